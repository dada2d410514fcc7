"""Physical pages from one shared pool, mapped into a contiguous virtual range per model.

Co-serving puts two models into one process: each has its own range, and pages move between them.
This file has the CPU's pool: a memfd, and `mmap` at fixed addresses. `cuda/pages.py` has the GPU's.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slackwater.model.errors import RefusedError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PUNCH_HOLE_KEEP_SIZE = 0x03
_FAILED = ctypes.c_void_p(-1).value


class PagePool(Protocol):
    """Physical pages. A page has no address until an arena maps it."""

    page_bytes: int
    capacity: int

    def take(self) -> int | None:
        """A page's id, or None when all are taken."""

    def give_back(self, page: int) -> None: ...

    def reserve(self, size_bytes: int) -> int:
        """The address of a fresh virtual range without memory behind it."""

    def release(self, address: int, size_bytes: int) -> None: ...

    def map(self, pages: Sequence[int], address: int) -> None:
        """Map pages at consecutive addresses from `address` on."""

    def unmap(self, address: int, count: int) -> None:
        """Unmap `count` pages from `address` on; nothing may be using them."""

    def quiesce(self) -> None:
        """Wait for the device's queued work, after which pages may be unmapped."""

    def trim(self) -> None:
        """Return the memory of free pages to the system, unless the device keeps it reserved."""

    @property
    def unclaimed_bytes(self) -> int:
        """Memory that pages may still claim from the device."""

    def set_aside(self, count: int) -> bool:
        """Lend the memory of `count` free pages to another use, in place of earlier ones (0: take
        it back); False if too few pages are free.
        """


class HostPagePool:
    """Pages of a memfd: memory without a fixed address."""

    unclaimed_bytes = 0  # host memory is claimed page by page: free pages reserve none of it

    def __init__(self, capacity_bytes: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.capacity = max(1, capacity_bytes // page_bytes)
        self._file = os.memfd_create("slackwater-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._file, self.capacity * page_bytes)
        self._free = list(range(self.capacity - 1, -1, -1))
        self._written: set[int] = set()  # pages that may occupy memory
        self._aside: list[int] = []

    def take(self) -> int | None:
        if not self._free:
            return None
        self._written.add(self._free[-1])
        return self._free.pop()

    def give_back(self, page: int) -> None:
        self._free.append(page)

    def trim(self) -> None:
        """Punch holes into the memfd where pages are free."""
        for page in (*self._free, *self._aside):
            if page in self._written:
                offset = page * self.page_bytes
                if _libc.fallocate(self._file, _PUNCH_HOLE_KEEP_SIZE, offset, self.page_bytes):
                    raise _system_error("fallocate")
                self._written.discard(page)

    def set_aside(self, count: int) -> bool:
        self._free, self._aside = [*self._aside, *self._free], []
        if count > len(self._free):
            return False
        if count:
            self._free, self._aside = self._free[count:], self._free[:count]
            self.trim()
        return True

    def reserve(self, size_bytes: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        return _mmap(None, size_bytes, 0, flags, -1, 0)

    def release(self, address: int, size_bytes: int) -> None:
        if _libc.munmap(address, size_bytes) != 0:
            raise _system_error("munmap")

    def map(self, pages: Sequence[int], address: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags, size = mmap.MAP_SHARED | _MAP_FIXED, self.page_bytes
        for start, stop in runs(pages):
            first = address + start * size
            _mmap(first, (stop - start) * size, access, flags, self._file, pages[start] * size)

    def unmap(self, address: int, count: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _mmap(address, count * self.page_bytes, 0, flags, -1, 0)

    def quiesce(self) -> None:
        """The CPU queues no work."""

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class PageArena:
    """One model's virtual range: a page is mapped when a held span first touches it, and stays
    mapped, idle, until `reclaim` unmaps it. `limit` bounds the mapped pages; `on_exhausted(pages)`
    is called once when the pool runs out, and may return pages to it.
    """

    def __init__(self, pool: PagePool, size_bytes: int) -> None:
        self.pool = pool
        pages = -(-size_bytes // pool.page_bytes)
        self.size_bytes = pages * pool.page_bytes
        self.address = pool.reserve(self.size_bytes)
        self.limit: int | None = None
        self.on_exhausted: Callable[[int], object] = lambda pages: None
        self._page_of: list[int | None] = [None] * pages
        self._users = [0] * pages
        self.mapped_pages = 0
        self._idle: dict[int, None] = {}

    @property
    def idle_pages(self) -> int:
        return len(self._idle)

    def hold(self, start: int, stop: int) -> bool:
        """Map memory at the bytes `[start, stop)`; False, and no change, if there is too little."""
        places = self._places(start, stop)
        unmapped = [place for place in places if self._page_of[place] is None]
        idle = [place for place in places if place in self._idle]
        for place in idle:  # first: `_map` may reclaim idle pages to stay within the limit
            del self._idle[place]
        if unmapped and not self._map(unmapped):
            self._idle |= dict.fromkeys(idle)
            return False
        for place in places:
            self._users[place] += 1
        return True

    def release(self, start: int, stop: int) -> None:
        """The opposite of `hold`: pages without users become idle."""
        for place in self._places(start, stop):
            self._users[place] -= 1
            assert self._users[place] >= 0, "a span was released twice"
            if self._users[place] == 0:
                self._idle[place] = None

    def reclaim(self, pages: int) -> int:
        """Return up to `pages` idle pages to the pool; how many were returned."""
        places = sorted(islice(self._idle, pages))
        if not places:
            return 0
        self.pool.quiesce()
        for start, stop in runs(places):
            self.pool.unmap(self._address(places[start]), stop - start)
        for place in reversed(places):  # the pool hands out the last returned page first
            page = self._page_of[place]
            assert page is not None, "an idle page is mapped"
            self.pool.give_back(page)
            self._page_of[place] = None
            del self._idle[place]
        self.mapped_pages -= len(places)
        return len(places)

    def release_idle(self) -> None:
        """Return every idle page to the pool, and its memory to the system."""
        if self._idle:
            self.reclaim(len(self._idle))
            self.pool.trim()

    def close(self) -> None:
        """Unmap everything and free the range; no view of it may exist any more."""
        for place in range(len(self._page_of)):
            if self._page_of[place] is not None:
                self._idle[place] = None
        self.reclaim(len(self._idle))
        self._page_of, self._users = [], []
        if self.size_bytes:
            self.pool.release(self.address, self.size_bytes)
            self.size_bytes = 0

    def _places(self, start: int, stop: int) -> range:
        """The pages of the range that the bytes `[start, stop)` touch."""
        return range(start // self.pool.page_bytes, -(-stop // self.pool.page_bytes))

    def _address(self, place: int) -> int:
        return self.address + place * self.pool.page_bytes

    def _map(self, places: Sequence[int]) -> bool:
        """Map pages at all of these places, or at none of them."""
        if self.limit is not None and self.mapped_pages + len(places) > self.limit:
            self.reclaim(self.mapped_pages + len(places) - self.limit)
            if self.mapped_pages + len(places) > self.limit:
                return False
        taken = self._take(len(places))
        if len(taken) < len(places):
            for page in reversed(taken):
                self.pool.give_back(page)
            return False
        for start, stop in runs(places):
            self.pool.map(taken[start:stop], self._address(places[start]))
        for place, page in zip(places, taken, strict=True):
            self._page_of[place] = page
        self.mapped_pages += len(places)
        return True

    def _take(self, count: int) -> list[int]:
        """Take up to `count` pages; `on_exhausted` gets one chance to return more to the pool."""
        taken: list[int] = []
        exhausted = False
        while len(taken) < count:
            page = self.pool.take()
            if page is not None:
                taken.append(page)
            elif exhausted:
                break
            else:
                exhausted = True
                self.on_exhausted(count - len(taken))
        return taken


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Slices `[start, stop)` of `numbers` in which each number is one above the previous."""
    edges = [place for place in range(1, len(numbers)) if numbers[place] != numbers[place - 1] + 1]
    return list(pairwise([0, *edges, len(numbers)])) if numbers else []


def host_view(arena: PageArena) -> NDArray[np.float32]:
    """The whole range as float32; touching memory that is not held is a fault."""
    buffer = (ctypes.c_char * arena.size_bytes).from_address(arena.address)
    view: NDArray[np.float32] = np.ctypeslib.as_array(buffer).view(np.float32)
    return view


def _mmap(address: int | None, size: int, access: int, flags: int, file: int, offset: int) -> int:
    found = _libc.mmap(address, size, access, flags, file, offset)
    if found is None or found == _FAILED:
        raise _system_error("mmap")
    return int(found)


def _system_error(call: str) -> RefusedError:
    number = ctypes.get_errno()
    return RefusedError(f"{call}: {os.strerror(number)}; lower kv_bytes or free memory")
