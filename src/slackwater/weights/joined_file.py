"""Joins the parts that ranks wrote into one safetensors file, without loading a tensor."""

import json
import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slackwater.model.errors import ConfigError
from slackwater.weights.catalog import VersionCatalog
from slackwater.weights.plan.shard_map import Box
from slackwater.weights.plan.transfer import PublishedSlice, whole_shapes

_LENGTH = struct.Struct("<Q")


class ExportCatalog(VersionCatalog):
    """A catalog that can export each version as one file."""

    def join(self, version: str, target: Path) -> None:
        """Write a version as one file, joining the parts of several ranks."""
        join_files(self.paths(version), target)


def join_files(parts: Sequence[Path], target: Path) -> None:
    """Write the whole tensors that the parts cover; refuses parts that lack elements."""
    slices: list[tuple[PublishedSlice, str, NDArray[np.uint8]]] = []
    for path in parts:
        data = np.memmap(path, np.uint8, mode="r")
        (length,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
        first = _LENGTH.size + length
        header = json.loads(data[_LENGTH.size : first].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            held = data[first + start : first + stop]
            slices.append((PublishedSlice.from_name(name, entry["shape"]), entry["dtype"], held))
    shapes = whole_shapes(each for each, _, _ in slices)
    dtypes = {each.tensor: dtype for each, dtype, _ in slices}
    widths = {each.tensor: len(held) // each.box.elements for each, _, held in slices}
    places, entries, at = {}, {}, 0
    for name in sorted(shapes):
        places[name] = slice(at, at + prod(shapes[name]) * widths[name])
        at = places[name].stop
        offsets = [places[name].start, at]
        entries[name] = {"dtype": dtypes[name], "shape": shapes[name], "data_offsets": offsets}
    # A part may name any slice, so the parts together may have gaps.
    if at > sum(len(held) for _, _, held in slices):
        raise ConfigError.of("version", parts[0].name, "must have parts that hold every element")
    head = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    head += b" " * (-len(head) % 8)
    with target.open("wb") as file:
        file.write(_LENGTH.pack(len(head)) + head)
        file.truncate(_LENGTH.size + len(head) + at)
    whole = np.memmap(target, np.uint8, mode="r+", offset=_LENGTH.size + len(head))
    for each, _, held in slices:
        shape, width = shapes[each.tensor], widths[each.tensor]
        tensor = whole[places[each.tensor]].reshape(*shape, width)
        tensor[each.box.index_in(Box.whole(shape))] = held.reshape(*each.box.shape, width)
    whole.flush()
