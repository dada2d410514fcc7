"""Trained weights as a standalone model directory: an adapter merged into its base.

If the base ties its head to its embedding, the result is untied, since an adapter changes only the
head.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from slackwater.model.adapter_config import HEAD
from slackwater.model.errors import ConfigError
from slackwater.nets.config import weight_files
from slackwater.nets.loading import write_tensors
from slackwater.zoo.directory import whole_folder

_PREFIX = "base_model.model."
_EMBEDDING = "model.embed_tokens.weight"
_HEAD_WEIGHT = f"{HEAD}.weight"
_SHARD_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"


def write_merged(base: Path, adapter: Path, out: Path) -> None:
    """Write `base` merged with the adapter of a folder in peft's format."""
    config = _read(adapter / "adapter_config.json")
    scale = float(config["lora_alpha"]) / int(config["r"])
    factors = load_file(adapter / "adapter_model.safetensors")
    layers = {
        name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        for name in factors
        if name.endswith(".lora_A.weight")
    }

    def transform(name: str, weight: Tensor) -> Tensor:
        layer = name.removesuffix(".weight")
        if layer not in layers:
            return weight
        layers.discard(layer)
        first = factors[f"{_PREFIX}{layer}.lora_A.weight"].float()
        second = factors[f"{_PREFIX}{layer}.lora_B.weight"].float()
        return (weight.float() + scale * (second @ first)).to(weight.dtype)

    _write(base, out, transform, own_head=HEAD in layers)
    if layers:
        shutil.rmtree(out)
        raise ConfigError.of("base model", str(base), f"has no layers {sorted(layers)[:3]}")


def write_untied(base: Path, out: Path) -> None:
    """Write `base` untied (`tie_word_embeddings: false`), so that head adapters can be merged."""
    _write(base, out, lambda name, weight: weight, own_head=True)


def _write(
    base: Path, out: Path, transform: Callable[[str, Tensor], Tensor], *, own_head: bool
) -> None:
    """Write shard by shard beside `out`, then rename; the rest of the folder is copied."""
    if out.exists():
        raise ConfigError.of("DIR", str(out), "is there already; name one that is not")
    files = weight_files(base)
    if not all(file.is_file() for file in files):
        raise ConfigError.of("base model", str(base), "must hold model.safetensors")
    config = _read(base / "config.json")
    with whole_folder(out) as partial:
        for file in base.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.name != _INDEX:
                shutil.copy(file, partial / file.name)
        shards = _Shards(partial)
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a dict: it cannot be iterated)
                    shards.add(name, transform(name, tensors.get_tensor(name)))
                    if name == _EMBEDDING and own_head and config.get("tie_word_embeddings"):
                        head = tensors.get_tensor(name).clone()
                        shards.add(_HEAD_WEIGHT, transform(_HEAD_WEIGHT, head))
                        config["tie_word_embeddings"] = False
        shards.finish()
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class _Shards:
    """Writes tensors into files of a few gigabytes, with an index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._bytes = self._total = 0
        self._written: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._bytes + size > _SHARD_BYTES:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._bytes += size
        self._total += size

    def finish(self) -> None:
        self._flush()
        if len(self._written) == 1:
            self._written[0][0].rename(self._folder / "model.safetensors")
            return
        weight_map = {name: path.name for path, names in self._written for name in names}
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        path = self._folder / f"model-{len(self._written) + 1:05d}.safetensors"
        write_tensors(self._pending, path)
        self._written.append((path, list(self._pending)))
        self._pending, self._bytes = {}, 0


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError.of("model file", str(path), "is missing")
    found: dict[str, Any] = json.loads(path.read_text())
    return found
