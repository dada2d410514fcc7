"""The weight port over a folder that publishers and pullers share."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slackwater.model.errors import RefusedError
from slackwater.tensors.checked_file import (
    FOR_TRANSFORMERS,
    content_digest,
    read_tensors,
    write_tensors,
)
from slackwater.weights.catalog import VersionCatalog


class DirectoryWeightStore(VersionCatalog):
    """Whole versions as checked files; visible by one rename."""

    def publish(
        self,
        version: str,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        durable: bool = True,
    ) -> None:
        """Publish a version atomically; idempotent, other bytes under the same name are refused."""
        path = self.path(version)
        if not path.is_file():
            try:
                write_tensors(
                    path, tensors, meta, FOR_TRANSFORMERS, durable=durable, replace_held=False
                )
                return
            except FileExistsError:  # another publisher was first meanwhile
                pass
        held = content_digest(read_tensors(path)[0])
        given = content_digest({name: tensor.cpu() for name, tensor in tensors.items()})
        if held != given:
            raise RefusedError(
                f"version: {version!r} is published with other weights, sha256 {held[:16]}; "
                f"these have {given[:16]}: publish them under a new name"
            )

    def pull(self, version: str, device: str = "cpu") -> dict[str, Tensor]:
        """The version's tensors, exactly as published."""
        return read_tensors(self.present(version), device)[0]
