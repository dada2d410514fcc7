"""Weight versions as directories that a server loads: whole weights, or an adapter.

An adapter that the server refuses, for its rank or its layers, is merged into the base.

Whole versions for a server that we started are in memory files, which are overwritten when their
version is dropped: writing to memory that was touched before is ten times as fast.

Hazard: when vLLM reloads weights in place, an output head tied to the embedding keeps its OLD
weights without an error (0.32, CPU). So a tied model is always written and served untied.
"""

import contextlib
import json
import os
import shutil
import struct
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, zeros

from slackwater.model.errors import ConfigError, NotFoundError
from slackwater.model.payload import Payload
from slackwater.nets.loading import net_config
from slackwater.nets.lora import LoraSpec, lora_of
from slackwater.tensors.checked_file import FOR_TRANSFORMERS, file_entries
from slackwater.weights.relay.memory import SharedMap, allocate_shared
from slackwater.worker.puller import WeightLane
from slackwater.zoo.exported import write_merged, write_untied

_TIED = "tie_word_embeddings"
# `_FILES` memory files may take this part of the machine's memory.
_MEMORY_DIVISOR = 4
_FILES = 3


def is_tied(model: Path) -> bool:
    """Whether a model directory ties its output head to its embedding."""
    return bool(_config(model).get(_TIED))


def require_own_head(served: Path, model: Path) -> None:
    """Refuse a server whose weights could not be replaced; `served` is what it reports."""
    if is_tied(model) and (not (served / "config.json").is_file() or is_tied(served)):
        raise ConfigError.of(
            "vLLM server: model",
            str(served),
            "ties its output head, which a reload leaves as it was; let the adapter start the "
            "server",
        )


class VersionDirectories:
    """One directory per version under `folder`; the base's is the model itself unless tied.

    `in_memory` requires that the readers are on this machine and see this process.
    """

    def __init__(
        self,
        lane: WeightLane,
        model: Path,
        base_version: str,
        folder: Path,
        *,
        in_memory: bool = False,
    ) -> None:
        self._lane = lane
        self._model = model
        self._folder = folder
        self._base_version = base_version
        self._directories: dict[str, Path] = {}
        self._adapters: dict[str, Path] = {}
        self._in_memory = in_memory
        self._files: dict[Path, MemoryFile] = {}
        self._free_files: deque[MemoryFile] = deque(maxlen=1)
        self._directories[base_version] = model
        if is_tied(model):
            self._directories[base_version] = folder / "base"
            write_untied(model, folder / "base")

    def __contains__(self, version: str) -> bool:
        return version in self._directories or version in self._adapters

    def directory(self, version: str) -> Path:
        directory = self._directories.get(version)
        if directory is None:
            raise NotFoundError(f"version: {version!r} was not pulled")
        return directory

    def adapter(self, version: str) -> Path | None:
        """The adapter's directory, in peft's format, if the version is one."""
        return self._adapters.get(version)

    def pull(self, version: str, route: Sequence[Payload] = (), *, keep: bool = False) -> bool:
        """Write the version's directory; whether a host copy is kept for deltas."""
        if version in self:
            return False
        pulled = self._lane.take(version, route, keep=keep)
        lora, tensors = lora_of(pulled.meta), pulled.tensors
        if lora is None:
            self._directories[version] = self._write_version(dict(tensors))
        else:
            self._adapters[version] = self._write_adapter(lora, tensors)
        return pulled.kept

    def merge(self, version: str) -> None:
        """Replace an adapter by whole weights: the base with the adapter merged."""
        adapter = self._adapters.pop(version)
        merged = adapter.with_name(f"merged-{adapter.name}")
        write_merged(self._directories[self._base_version], adapter, merged)
        self._directories[version] = merged
        shutil.rmtree(adapter, ignore_errors=True)

    def drop(self, version: str) -> None:
        """Forget a version that was pulled."""
        if version == self._base_version:
            return
        for directories in (self._directories, self._adapters):
            if (directory := directories.pop(version, None)) is not None:
                if (file := self._files.pop(directory, None)) is not None:
                    self._free_files.append(file)
                shutil.rmtree(directory, ignore_errors=True)

    def _write_version(self, tensors: dict[str, Tensor]) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="version-", dir=self._folder))
        for file in self._model.glob("*.json"):
            if file.name != "config.json" and not file.name.endswith(".index.json"):
                shutil.copy(file, directory)
        config = _config(self._model) | {_TIED: False}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
        path = directory / "model.safetensors"
        if self._in_memory and fits_in_memory(tensors):
            path.symlink_to(self._fill_memory_file(directory, tensors))
            return directory
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        # The head may be the embedding's tensor, which safetensors refuses.
        contiguous["lm_head.weight"] = contiguous["lm_head.weight"].clone()
        save_file(contiguous, path, metadata={"format": "pt"})
        return directory

    def _fill_memory_file(self, directory: Path, tensors: Mapping[str, Tensor]) -> Path:
        """The path of a memory file with these tensors; reuses a free file of the same layout."""
        file: MemoryFile | None = None
        with contextlib.suppress(IndexError):  # pulls run in several threads
            file = self._free_files.pop()
        if file is None or not file.has_layout(tensors):
            file = MemoryFile(tensors)
        file.fill(tensors)
        self._files[directory] = file
        return file.path

    def write_neutral_adapter(self) -> Path:
        """An adapter that changes nothing."""
        lora = LoraSpec(1, mlp=False, unembed=False)
        shapes = lora.tensor_shapes(net_config(self._model))
        return self._write_adapter(lora, {name: zeros(shape) for name, shape in shapes.items()})

    def _write_adapter(self, lora: LoraSpec, tensors: Mapping[str, Tensor]) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="adapter-", dir=self._folder))
        (directory / "adapter_config.json").write_text(json.dumps(lora.peft_config()))
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        return directory


def _config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def fits_in_memory(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this machine has /proc paths and memory for `_FILES` such files."""
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed_bytes = _FILES * sum(tensor.nbytes for tensor in tensors.values())
    return Path("/proc/self/fd").is_dir() and needed_bytes <= total_bytes // _MEMORY_DIVISOR


class MemoryFile:
    """A safetensors file in this process's memory, which a server on this machine opens by its path
    and others of the same layout can overwrite.

    It disappears with the processes that have it open, however they end.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._entries, size = file_entries(tensors)
        text = json.dumps({"__metadata__": FOR_TRANSFORMERS, **self._entries}).encode()
        text = text.ljust(-(-len(text) // 8) * 8)  # readers want aligned data
        header = struct.pack("<Q", len(text)) + text
        self._begin = len(header)
        self._memory = allocate_shared(self._begin + size)
        self._memory[: self._begin] = header
        shared_map = self._memory.obj
        assert isinstance(shared_map, SharedMap)
        self.path = Path(f"/proc/{os.getpid()}/fd/{shared_map.descriptor}")

    def has_layout(self, tensors: Mapping[str, Tensor]) -> bool:
        return file_entries(tensors)[0] == self._entries

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of the same layout into the file."""
        for name, tensor in tensors.items():
            start, stop = (self._begin + offset for offset in self._entries[name]["data_offsets"])
            target = np.frombuffer(self._memory[start:stop], np.uint8)
            np.copyto(target, tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
