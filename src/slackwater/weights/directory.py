"""Weight versions in a folder that trainers and engines share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slackwater.model.errors import RefusedError
from slackwater.tensors.checked_file import (
    FOR_TRANSFORMERS,
    checksum,
    content_digest,
    map_tensors,
    read_tensors,
    write_tensors,
)
from slackwater.tensors.header import read_header, unusable
from slackwater.weights.catalog import VersionCatalog, parts_of
from slackwater.weights.plan.shard_map import RankShards
from slackwater.weights.plan.transfer import PublishedSlice, plan_fetches, whole_shapes


def read_slices(paths: Sequence[Path], receiver: RankShards) -> tuple[dict[str, Tensor], int]:
    """A rank's local tensors, and the bytes read: only the slices that it holds.

    A slice that is read whole is checked against the checksum in its file.
    """
    local: dict[str, Tensor] = {}
    bytes_read = 0
    for path in paths:
        header = read_header(path)
        stored = map_tensors(path, header)
        for name, shape in header.shapes.items():
            source = PublishedSlice.from_name(name, shape)
            for fetch in plan_fetches([source], receiver):
                values = stored[name][fetch.box.index_in(source.box)]
                bytes_read += values.nbytes
                if fetch.box == source.box and checksum(values) != header.crc32[name]:
                    raise unusable(path, f"the bytes of {name} are not as written")
                tensor = source.tensor
                if tensor not in local:
                    local[tensor] = torch.zeros(receiver.shapes[tensor], dtype=values.dtype)
                local[tensor][fetch.place] = values
    return local, bytes_read


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
        """Publish a version atomically. Idempotent; other bytes under the same name are refused.

        Without `durable` it is visible sooner, but may be lost in a power failure.
        """
        path = self.path(version)
        if not path.is_file():
            try:
                write_tensors(
                    path, tensors, meta, FOR_TRANSFORMERS, durable=durable, replace_held=False
                )
                return
            except FileExistsError:  # another publisher was faster
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
        paths = [self.present(part) for part in parts_of(version, self.meta(version))]
        if not paths:
            return read_tensors(self.present(version), device)[0]
        headers = [read_header(path) for path in paths]
        shapes = whole_shapes(
            PublishedSlice.from_name(name, shape)
            for header in headers
            for name, shape in header.shapes.items()
        )
        tensors, _ = read_slices(paths, RankShards.whole(shapes))
        return {name: tensor.to(device) for name, tensor in sorted(tensors.items())}

    def pull_slices(self, version: str, receiver: RankShards) -> tuple[dict[str, Tensor], int]:
        """One engine rank's slices of a version, and the bytes read for them."""
        parts = parts_of(version, self.meta(version)) or (version,)
        return read_slices([self.present(part) for part in parts], receiver)
