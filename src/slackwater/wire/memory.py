"""A process's own memory: how much it holds, and what it may give back."""

import ctypes
import os
import sys
from pathlib import Path

MEMORY_GAUGE = "memory_bytes"
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> float:
    """Resident memory including shared pages; 0 where the system does not tell."""
    try:
        return float(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0.0


def trim_heap() -> None:
    """Return freed memory to the system, which glibc keeps below its highest block in use."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)
