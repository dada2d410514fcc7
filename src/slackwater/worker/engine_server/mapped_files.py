"""Runs inside vLLM, without this package: safetensors files of the adapter's memory, mapped once.

Mapping half a gigabyte anew costs a tenth of an update. The adapter writes new versions over files
of dropped ones, so a file is known by its inode, which lives as long as the mapping: a path's
descriptor number can come to name another file.
"""

import json
import mmap
import os
import struct
import warnings
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES

_KEPT = 3  # as many as the adapter has at a time


class MappedFiles:
    """The last few files; their tensors are views, and change when the file is written over."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def tensors(self, path: str) -> dict[str, torch.Tensor]:
        """All tensors of a file, in its order; those of a file that has a name are not kept."""
        with open(path, "rb") as file:  # noqa: PTH123  # what is opened is what is mapped
            status = os.fstat(file.fileno())
            key = (status.st_dev, status.st_ino)
            if key in self._kept:
                return self._kept[key]
            if status.st_nlink:
                with safe_open(path, framework="pt") as named:
                    return {name: named.get_tensor(name) for name in named.keys()}  # noqa: SIM118
            found = _mapped(file.fileno())
        while len(self._kept) >= _KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = found
        return found


def _mapped(descriptor: int) -> dict[str, torch.Tensor]:
    every_page = getattr(mmap, "MAP_POPULATE", 0)
    memory = mmap.mmap(descriptor, 0, mmap.MAP_SHARED | every_page, mmap.PROT_READ)
    (length,) = struct.unpack("<Q", memory[:8])
    entries = json.loads(memory[8 : 8 + length])
    entries.pop("__metadata__", None)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no tensors that cannot be written
        for name, entry in entries.items():
            start, stop = entry["data_offsets"]
            kind: Any = _TYPES[entry["dtype"]]
            count = (stop - start) // kind.itemsize
            flat = torch.frombuffer(memory, dtype=kind, count=count, offset=8 + length + start)
            found[name] = flat.view(entry["shape"])
    return found
