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
from slackwater.weights.catalog import VersionCatalog, parts_of
from slackwater.weights.plan.shard_map import RankShards
from slackwater.weights.slices import join_slices, read_slices


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
        if "parts" in meta and self.meta(version) == meta:
            return  # each part was compared when its rank published it again
        held = content_digest(self.pull(version))
        given = content_digest({name: tensor.cpu() for name, tensor in tensors.items()})
        if held != given:
            raise RefusedError(
                f"version: {version!r} is published with other weights, sha256 {held[:16]}; "
                f"these have {given[:16]}: publish them under a new name"
            )

    def pull(self, version: str, device: str = "cpu") -> dict[str, Tensor]:
        """The version's tensors, exactly as published."""
        tensors, header = read_tensors(self.present(version), device)
        parts = parts_of(version, header.meta)
        if parts:
            tensors = join_slices(read_tensors(self.present(part))[0] for part in parts)
            tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        return tensors

    def pull_slices(self, version: str, receiver: RankShards) -> tuple[dict[str, Tensor], int]:
        """What one rank of an engine holds of a version, and the bytes that were read for it."""
        parts = parts_of(version, self.meta(version)) or (version,)
        return read_slices([self.present(part) for part in parts], receiver)
