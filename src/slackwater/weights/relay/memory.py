"""Memory in huge pages where available, and memory that another process can map.

Memory is faulted in page by page: a gigabyte takes 250,000 faults in small pages, 500 in huge ones.
"""

import ctypes
import mmap
import os
import weakref
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

_HUGE = 2 << 20
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory, the default, has small pages


def allocate_anonymous(size: int) -> memoryview:
    """Untouched memory of zeros, aligned to a huge page unless it is smaller than one."""
    if size < _HUGE:
        return memoryview(mmap.mmap(-1, max(size, 1), _PRIVATE))[:size]
    mapped = mmap.mmap(-1, size + _HUGE, _PRIVATE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % _HUGE
    with suppress(OSError):  # a system without them
        # The rest below a whole huge page keeps small pages: no more is used than requested.
        mapped.madvise(mmap.MADV_HUGEPAGE, start, size - size % _HUGE)
    return memoryview(mapped)[start : start + size]


class SharedMap(mmap.mmap):
    """Memory with a descriptor for other processes; freed with its last mapping."""

    descriptor: int


def allocate_shared(size: int) -> memoryview:
    """Populated memory of zeros that another process can map by its `descriptor_of`."""
    descriptor = os.memfd_create("slackwater version")
    try:
        os.truncate(descriptor, max(size, 1))
        # A full system fails here, not by a signal later.
        os.posix_fallocate(descriptor, 0, max(size, 1))
        mapped = SharedMap(descriptor, max(size, 1), mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except BaseException:
        os.close(descriptor)
        raise
    mapped.descriptor = descriptor
    weakref.finalize(mapped, os.close, descriptor)
    return memoryview(mapped)[:size]


def map_shared(descriptor: int, size: int) -> memoryview:
    """Map another process's `shared` memory; private, so writes stay here."""
    return memoryview(mmap.mmap(descriptor, size, mmap.MAP_PRIVATE))


def descriptor_of(array: NDArray[np.uint8]) -> int:
    """The descriptor of the `allocate_shared` memory that this array is part of."""
    part: object = array.base
    assert isinstance(part, memoryview)
    whole: object = part.obj
    assert isinstance(whole, SharedMap)
    return whole.descriptor
