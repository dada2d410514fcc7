"""Weight versions as directories that a server loads: whole weights, or an adapter.

An adapter that the server refuses, for its rank or its layers, is merged into the base.

Hazard: when vLLM reloads weights in place, an output head tied to the embedding keeps its OLD
weights without an error (0.32, CPU). So a tied model is always written and served untied.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, zeros

from slackwater.model.errors import ConfigError, NotFoundError
from slackwater.model.payload import Payload
from slackwater.nets.loading import load_net, net_config, net_tensors
from slackwater.nets.lora import LoraAdapter, LoraSpec
from slackwater.worker.weight_lane import WeightLane, lora_of

ADAPTER_TENSORS = "adapter_model.safetensors"
ADAPTER_META = "slackwater_adapter.json"
_TIED = "tie_word_embeddings"


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
    """One directory per version under `folder`; the base's is the model itself unless tied."""

    def __init__(self, lane: WeightLane, model: Path, base_version: str, folder: Path) -> None:
        self._lane = lane
        self._model = model
        self._folder = folder
        self._base_version = base_version
        self._held: dict[str, Path] = {}
        self._adapters: dict[str, Path] = {}
        self._held[base_version] = self._written(self._base()) if is_tied(model) else model

    def __contains__(self, version: str) -> bool:
        return version in self._held or version in self._adapters

    def directory(self, version: str) -> Path:
        found = self._held.get(version)
        if found is None:
            raise NotFoundError(f"version: {version!r} was not pulled")
        return found

    def adapter(self, version: str) -> Path | None:
        """The adapter's directory, in peft's format, if the version is one."""
        return self._adapters.get(version)

    def pull(self, version: str, way: Sequence[Payload] = (), *, keep: bool = False) -> bool:
        """Make the version's directory atomically; whether a host copy is kept for deltas."""
        if version in self:
            return False
        taken = self._lane.take(version, way, keep=keep)
        lora, tensors = lora_of(taken.meta), taken.tensors
        if lora is None:
            self._held[version] = self._written(dict(tensors))
        else:
            self._adapters[version] = self._written_adapter(lora, tensors)
        return taken.kept

    def merge(self, version: str) -> None:
        """Make whole weights of an adapter and the base."""
        adapter = self._adapters.pop(version)
        config = json.loads((adapter / ADAPTER_META).read_text())
        self._held[version] = self._written(
            self._merged(LoraSpec(**config), load_file(adapter / ADAPTER_TENSORS))
        )
        shutil.rmtree(adapter, ignore_errors=True)

    def drop(self, version: str) -> None:
        """Forget a version that was pulled."""
        if version == self._base_version:
            return
        for held in (self._held, self._adapters):
            if (directory := held.pop(version, None)) is not None:
                shutil.rmtree(directory, ignore_errors=True)

    def _base(self) -> dict[str, Tensor]:
        return net_tensors(load_net(self._model))

    def _written(self, tensors: dict[str, Tensor]) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="version-", dir=self._folder))
        for file in self._model.glob("*.json"):
            if file.name != "config.json" and not file.name.endswith(".index.json"):
                shutil.copy(file, directory)
        config = _config(self._model) | {_TIED: False}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if "lm_head.weight" not in tensors:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    def neutral_adapter(self) -> Path:
        """An adapter that changes nothing."""
        lora = LoraSpec(1, mlp=False, unembed=False)
        shapes = lora.tensor_shapes(net_config(self._model))
        return self._written_adapter(lora, {name: zeros(shape) for name, shape in shapes.items()})

    def _written_adapter(self, lora: LoraSpec, tensors: Mapping[str, Tensor]) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="adapter-", dir=self._folder))
        (directory / "adapter_config.json").write_text(json.dumps(lora.peft_config()))
        (directory / ADAPTER_META).write_text(json.dumps(asdict(lora)))
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, directory / ADAPTER_TENSORS, metadata={"format": "pt"})
        return directory

    def _merged(self, lora: LoraSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        net = load_net(self._model)
        adapter = LoraAdapter(lora, net.config, tensors)
        merged = net_tensors(net)
        merged.setdefault("lm_head.weight", merged["model.embed_tokens.weight"].clone())
        for layer in lora.shapes(net.config):
            pair = adapter.pair(layer)
            assert pair is not None
            first, second = pair
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + lora.scale * (second @ first)
        return merged


def _config(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "config.json").read_text())
    return found
