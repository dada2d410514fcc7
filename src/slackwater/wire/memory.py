"""A process's own memory: its size, and how to return freed memory to the system."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

MEMORY_GAUGE = "memory_bytes"
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGE_BYTES = 128 << 10


def resident_bytes() -> float:
    """Resident memory including shared pages; 0 where it cannot be read."""
    try:
        return float(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0.0


def keep_heap_small(large_bytes: int = _LARGE_BYTES) -> None:
    """Configure malloc for a long-lived process, before it starts threads: one heap for all, and
    large buffers outside it, so that freed memory is reused or returned. By default glibc has a
    heap per thread and puts ever larger buffers into it.
    """
    if (limit := _glibc_function("mallopt")) is not None:
        limit(_M_ARENA_MAX, 1)
        limit(_M_MMAP_THRESHOLD, large_bytes)
        limit(_M_TRIM_THRESHOLD, large_bytes)


def trim_heap() -> None:
    """Return freed memory that glibc keeps below its highest used block."""
    if (trim := _glibc_function("malloc_trim")) is not None:
        trim(0)


def _glibc_function(name: str) -> Any:
    """A function of glibc, if that is the system's C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
