"""Weight versions as directories that a vLLM server can load: whole weights, or an adapter merged into the base."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from slackwater.model.errors import NotFoundError, RefusedError
from slackwater.nets.loading import load_net, net_tensors
from slackwater.nets.lora import LoraAdapter, LoraSpec
from slackwater.weights.port import WeightStore
from slackwater.worker.published import lora_of


class VersionDirectories:
    """One directory per version under `folder`; the base's is the model itself."""

    def __init__(self, store: WeightStore, model: Path, base_version: str, folder: Path) -> None:
        self._store = store
        self._model = model
        self._folder = folder
        self._held: dict[str, Path] = {base_version: model}

    def __contains__(self, version: str) -> bool:
        return version in self._held

    def directory(self, version: str) -> Path:
        found = self._held.get(version)
        if found is None:
            raise NotFoundError(f"version: {version!r} was not pulled")
        return found

    def pull(self, version: str) -> None:
        """Make the version's directory; it is there whole or not at all."""
        if version in self._held:
            return
        lora = lora_of(self._store.manifest(version).meta)
        tensors: Mapping[str, Tensor] = self._store.pull(version)
        if lora is not None:
            tensors = self._merged(lora, tensors)
        directory = Path(tempfile.mkdtemp(prefix="version-", dir=self._folder))
        for file in self._model.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, directory)
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
        self._held[version] = directory

    def drop(self, version: str) -> None:
        """Forget a version that was pulled."""
        directory = self._held.get(version)
        if directory is not None and directory != self._model:
            del self._held[version]
            shutil.rmtree(directory, ignore_errors=True)

    def _merged(self, lora: LoraSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tied = json.loads((self._model / "config.json").read_text()).get("tie_word_embeddings")
        if lora.unembed and tied:
            raise RefusedError(
                "vLLM holds no adapter on an unembedding tied to the embedding; "
                "train with train_unembed=False"
            )
        net = load_net(self._model)
        adapter = LoraAdapter(lora, net.config, tensors)
        merged = dict(net_tensors(net))
        for layer in lora.shapes(net.config):
            pair = adapter.pair(layer)
            assert pair is not None
            first, second = pair
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + lora.scale * (second @ first)
        return merged
