"""Moving KV memory between two models: `slackwater bench pages`, on the CPU against `mmap`'s own
cost.

Pages go from the rollout's range to the service's: unmapped there, given back, taken, mapped here.
The floor is the same number of bytes unmapped and mapped by bare `mmap` calls, one for each page,
and one for all of them.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable

import numpy as np

from benchmarks.options import BenchOptions

_PAGE = 2 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


def run(options: BenchOptions) -> dict[str, float]:
    """Milliseconds for the whole move, medians; scattered is after use has mixed the pages up."""
    from slackwater.engine.pages import HostPagePool, PageArena

    pages = 64 if options.quick else 512
    rounds = 3 if options.quick else 5
    pool = HostPagePool(pages * _PAGE, _PAGE)
    rollout, service = (PageArena(pool, pages * _PAGE) for _ in range(2))
    rng = np.random.default_rng(options.seed)

    def move(source: PageArena, target: PageArena, order: list[int]) -> float:
        _touch(source.address, pages * _PAGE)
        for place in order:
            source.release(place * _PAGE, (place + 1) * _PAGE)
        began_s = time.perf_counter()
        source.reclaim(pages)
        gone_s = time.perf_counter()
        if order[0]:
            rng.shuffle(pool._free)  # as after long use
        mixed_s = time.perf_counter()
        assert target.hold(0, pages * _PAGE)
        return gone_s - began_s + time.perf_counter() - mixed_s

    assert rollout.hold(0, pages * _PAGE)
    ways: dict[str, list[float]] = {"ordered": [], "scattered": []}
    for number in range(2 * rounds):
        name = "ordered" if number < rounds else "scattered"
        order = list(range(pages)) if name == "ordered" else list(range(pages - 1, -1, -1))
        ways[name].append(move(rollout, service, order))
        ways[name].append(move(service, rollout, order))
        options.progress(name, number / (2 * rounds))
    each, whole = _bare(pages, rounds)
    ordered, scattered = (float(np.median(ways[name])) for name in ("ordered", "scattered"))
    rollout.close()
    service.close()
    pool.close()
    return {
        "pages": float(pages),
        "gigabytes": pages * _PAGE / 2**30,
        "ordered_ms": 1e3 * ordered,
        "scattered_ms": 1e3 * scattered,
        "mmap_each_page_ms": 1e3 * each,
        "mmap_whole_ms": 1e3 * whole,
        "ordered_over_mmap": ordered / each,
        "scattered_over_mmap": scattered / each,
    }


def _touch(address: int, size: int) -> None:
    """Use every page of the system's, as keys and values would."""
    buffer = (ctypes.c_char * size).from_address(address)
    np.ctypeslib.as_array(buffer).view(np.uint8)[::4096] += 1


def _bare(pages: int, rounds: int) -> tuple[float, float]:
    """Unmap and map by bare calls: page by page, and all at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    call: Callable[..., int] = libc.mmap
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    size = pages * _PAGE
    file = os.memfd_create("slackwater-bare", os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    first, second = (call(None, size, 0, nothing, -1, 0) for _ in range(2))
    access, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    steps: dict[int, list[float]] = {_PAGE: [], size: []}
    for _ in range(rounds):
        for step, took in steps.items():
            for source, target in ((first, second), (second, first)):
                call(source, size, access, shared, file, 0)
                _touch(source, size)
                began_s = time.perf_counter()
                for offset in range(0, size, step):
                    call(source + offset, step, 0, nothing | _MAP_FIXED, -1, 0)
                for offset in range(0, size, step):
                    call(target + offset, step, access, shared, file, offset)
                took.append(time.perf_counter() - began_s)
    os.close(file)
    for address in (first, second):
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return float(np.median(steps[_PAGE])), float(np.median(steps[size]))
