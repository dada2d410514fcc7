"""Memory in huge pages, where the system has them.

A system gives memory out page by page, at first touch: a gigabyte is a quarter of a million interruptions in small pages, and five hundred in huge ones.
"""

import ctypes
import mmap
from contextlib import suppress

_HUGE = 2 << 20
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory, the default, has small pages


def anonymous(size: int) -> memoryview:
    """Memory of zeros, not yet touched, that begins a huge page unless it is smaller than one."""
    if size < _HUGE:
        return memoryview(mmap.mmap(-1, max(size, 1), _PRIVATE))[:size]
    mapped = mmap.mmap(-1, size + _HUGE, _PRIVATE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % _HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            # What is left over has small pages, so that no more is taken than was asked for.
            mapped.madvise(mmap.MADV_HUGEPAGE, start, size - size % _HUGE)
    return memoryview(mapped)[start : start + size]
