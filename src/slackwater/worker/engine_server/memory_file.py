"""A safetensors file in this process's memory, which a server on this machine opens by its path.

It goes with the processes that have it open, however they end.
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
from slackwater.weights.relay.memory import SharedMap, shared

_SHARE = 4  # of the machine's memory, for `_FILES` of them
_FILES = 3


def fits_in_memory(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this machine has the paths, and the memory for some such files."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = _FILES * sum(tensor.nbytes for tensor in tensors.values())
    return Path("/proc/self/fd").is_dir() and wanted <= machine // _SHARE


class MemoryFile:
    """Holds tensors of one layout; others of that layout can be written over them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._entries, size = file_entries(tensors)
        text = json.dumps({"__metadata__": FOR_TRANSFORMERS, **self._entries}).encode()
        text = text.ljust(-(-len(text) // 8) * 8)  # readers want aligned data
        header = struct.pack("<Q", len(text)) + text
        self._begin = len(header)
        self._memory = shared(self._begin + size)
        self._memory[: self._begin] = header
        held = self._memory.obj
        assert isinstance(held, SharedMap)
        self.path = Path(f"/proc/{os.getpid()}/fd/{held.descriptor}")

    def takes(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these have the file's layout."""
        return file_entries(tensors)[0] == self._entries

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors that it takes."""
        for name, tensor in tensors.items():
            start, stop = (self._begin + at for at in self._entries[name]["data_offsets"])
            place = np.frombuffer(self._memory[start:stop], np.uint8)
            np.copyto(place, tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
