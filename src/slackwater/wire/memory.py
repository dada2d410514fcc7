"""A process's own memory: how much it holds, and what it may give back."""

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
    """Resident memory including shared pages; 0 where the system does not tell."""
    try:
        return float(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0.0


def keep_heap_small(large_bytes: int = _LARGE_BYTES) -> None:
    """For a process with many threads that lives long, before it starts them: one heap for all, and
    large buffers apart from it, so that what is freed is used again or returned. glibc would make a
    heap per thread, and let ever larger buffers into it.
    """
    if (limit := _of_glibc("mallopt")) is not None:
        limit(_M_ARENA_MAX, 1)
        limit(_M_MMAP_THRESHOLD, large_bytes)
        limit(_M_TRIM_THRESHOLD, large_bytes)


def trim_heap() -> None:
    """Return freed memory to the system, which glibc keeps below its highest block in use."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(name: str) -> Any:
    """The function, if the system's C library is glibc."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
