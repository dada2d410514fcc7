"""Tensors out of the slices that several ranks wrote of them: whole, or what a rank holds."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from slackwater.tensors.header import read_header, unusable
from slackwater.weights.plan.box import Box
from slackwater.weights.plan.shard_map import RankShards
from slackwater.weights.plan.transfer import PublishedSlice, fetches


def join_slices(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The whole tensors of which the parts hold every element."""
    slices = [
        (PublishedSlice.named(name, rank), tensor)
        for rank, part in enumerate(parts)
        for name, tensor in part.items()
    ]
    shapes: dict[str, tuple[int, ...]] = {}
    for each, _ in slices:
        least = shapes.get(each.tensor, (0,) * len(each.box.stop))
        shapes[each.tensor] = tuple(map(max, least, each.box.stop))
    whole: dict[str, Tensor] = {}
    for each, tensor in slices:
        shape = shapes[each.tensor]
        if each.tensor not in whole:
            whole[each.tensor] = torch.empty(shape, dtype=tensor.dtype)
        whole[each.tensor][each.box.within(Box.whole(shape))] = tensor
    return dict(sorted(whole.items()))


def read_slices(paths: Sequence[Path], receiver: RankShards) -> tuple[dict[str, Tensor], int]:
    """A rank's local tensors, and the bytes read: of every file exactly what it holds.

    A slice that is taken whole is checked against the sum in its file.
    """
    local: dict[str, Tensor] = {}
    came = 0
    for path in paths:
        header = read_header(path)
        with safe_open(path, framework="pt") as stored:
            for name, shape in header.shapes.items():
                source = PublishedSlice(0, name, Box.whole(shape))
                if name.endswith("]"):
                    source = PublishedSlice.named(name, 0)
                for fetch in fetches([source], receiver):
                    values = stored.get_slice(name)[fetch.box.within(source.box)]
                    came += values.nbytes
                    if fetch.box == source.box and _sum(values) != header.crc32[name]:
                        raise unusable(path, f"the bytes of {name} are not as written")
                    if fetch.local not in local:
                        shape = receiver.shapes[fetch.local]
                        local[fetch.local] = torch.zeros(shape, dtype=values.dtype)
                    local[fetch.local][fetch.place] = values
    return local, came


def _sum(values: Tensor) -> int:
    return zlib.crc32(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
