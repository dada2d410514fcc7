"""Runs inside vLLM, without this package: safetensors files of the adapter's memory, mapped once.

Mapping half a gigabyte anew costs a tenth of an update. The adapter overwrites files of dropped
versions. A file is identified by its inode, which lives as long as the mapping; the descriptor
number in its path can be reused for another file.
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

_MAX_FILES = 3  # as many as the adapter has at a time


class MappedFiles:
    """The last few files; their tensors are views and change when the file is overwritten."""

    def __init__(self) -> None:
        self._cache: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def tensors(self, path: str) -> dict[str, torch.Tensor]:
        """All tensors of a file, in its order; only unnamed (memory) files are cached."""
        with open(path, "rb") as file:  # noqa: PTH123  # the mapping needs this very descriptor
            status = os.fstat(file.fileno())
            key = (status.st_dev, status.st_ino)
            if key in self._cache:
                return self._cache[key]
            if status.st_nlink:
                with safe_open(path, framework="pt") as handle:
                    return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
            tensors = _map_file(file.fileno())
        while len(self._cache) >= _MAX_FILES:
            del self._cache[next(iter(self._cache))]
        self._cache[key] = tensors
        return tensors


def _map_file(descriptor: int) -> dict[str, torch.Tensor]:
    every_page = getattr(mmap, "MAP_POPULATE", 0)
    memory = mmap.mmap(descriptor, 0, mmap.MAP_SHARED | every_page, mmap.PROT_READ)
    (length,) = struct.unpack("<Q", memory[:8])
    entries = json.loads(memory[8 : 8 + length])
    entries.pop("__metadata__", None)
    tensors = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors
        for name, entry in entries.items():
            start, stop = entry["data_offsets"]
            kind: Any = _TYPES[entry["dtype"]]
            count = (stop - start) // kind.itemsize
            flat = torch.frombuffer(memory, dtype=kind, count=count, offset=8 + length + start)
            tensors[name] = flat.view(entry["shape"])
    return tensors
