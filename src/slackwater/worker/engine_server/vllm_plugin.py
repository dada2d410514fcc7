"""Runs inside vLLM, without this package: a weight transfer backend that loads the tensors of a
safetensors file, layer by layer, between `/start_weight_update` and `/finish_weight_update`.

The embedding is copied in place: no kernel has another form of it, since every model that comes
here has an output head of its own (`versions.py`).
"""

from dataclasses import dataclass
from typing import Any

from slackwater_mapped_files import MappedFiles
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.inplace import get_parameter_for_reload

BACKEND = "slackwater_file"
EMBEDDING = "model.embed_tokens.weight"


@dataclass
class FileTransferInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not here
    """What tells this backend from others, which have no such field."""

    file_format: str


@dataclass
class FileTransferUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not here
    """One file of a version."""

    path: str


class FileTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not here
    """Loads files that the server can read."""

    init_info_cls = FileTransferInit
    update_info_cls = FileTransferUpdate

    def init_transfer_engine(self, init_info: FileTransferInit) -> None:
        if init_info.file_format != "safetensors":
            raise ValueError(f"file_format: {init_info.file_format!r} must be safetensors")
        self._files = MappedFiles()

    def start_weight_update(self) -> None:
        try:
            self._embedding = get_parameter_for_reload(self.model, EMBEDDING)
        except AttributeError:  # a model of another family, or a rank without it
            self._embedding = None
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base's, which waits for an accelerator that a CPU build does not have. On a GPU
        # the copies are queued before every later step.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileTransferUpdate) -> None:
        tensors = dict(self._files.tensors(update_info.path))
        embedding, held = tensors.get(EMBEDDING), self._embedding
        if embedding is not None and held is not None and embedding.shape == held.shape:
            held.data.copy_(tensors.pop(EMBEDDING))
        self.model.load_weights(tensors.items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._files = MappedFiles()


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileTransferEngine)
