"""A safetensors file in this process's memory, which a server on this machine opens by its path.

It disappears with the processes that have it open, however they end.
"""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slackwater.tensors.checked_file import FOR_TRANSFORMERS, file_entries
from slackwater.weights.relay.memory import SharedMap, allocate_shared

# `_FILES` memory files may take this part of the machine's memory.
_MEMORY_DIVISOR = 4
_FILES = 3


def fits_in_memory(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this machine has /proc paths and memory for `_FILES` such files."""
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed_bytes = _FILES * sum(tensor.nbytes for tensor in tensors.values())
    return Path("/proc/self/fd").is_dir() and needed_bytes <= total_bytes // _MEMORY_DIVISOR


class MemoryFile:
    """Tensors of one layout, which others of the same layout can overwrite."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._entries, size = file_entries(tensors)
        text = json.dumps({"__metadata__": FOR_TRANSFORMERS, **self._entries}).encode()
        text = text.ljust(-(-len(text) // 8) * 8)  # readers want aligned data
        header = struct.pack("<Q", len(text)) + text
        self._begin = len(header)
        self._memory = allocate_shared(self._begin + size)
        self._memory[: self._begin] = header
        shared_map = self._memory.obj
        assert isinstance(shared_map, SharedMap)
        self.path = Path(f"/proc/{os.getpid()}/fd/{shared_map.descriptor}")

    def has_layout(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these tensors have the file's layout."""
        return file_entries(tensors)[0] == self._entries

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of the same layout into the file."""
        for name, tensor in tensors.items():
            start, stop = (self._begin + offset for offset in self._entries[name]["data_offsets"])
            target = np.frombuffer(self._memory[start:stop], np.uint8)
            np.copyto(target, tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
