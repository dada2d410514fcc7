"""What a switch costs: a job's state leaves the device and another's comes, from host memory (warm)
and from disk (cold).

`warm_over_copy` is the time of a warm switch over that of copying the same bytes between memories
that have been touched, in the same run. A warm switch is all that happens between two jobs'
operations: save, load, and the manager's part. `cold_over_warm` compares it with a start from disk;
where that runs at the disk's own speed, `at_disk_limit` (speed of the fastest cold start over that
of the fastest reading of another file of the same size, written at the same time, in the same way,
unchecked, into memory that has been touched) is near 1. The fastest, since a virtual disk stalls at
random for longer than a read takes; which file is written first and which is read first changes
from round to round, since its host may have the one in memory and not the other.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.options import BenchOptions
from slackwater.model.residency import StateBudgets, StateKey, StoredPart, Tier
from slackwater.state.device import DeviceTier
from slackwater.state.disk import LANES, PIECE, DiskTier
from slackwater.state.image import HostImage
from slackwater.state.manager import StateManager
from slackwater.state.port import About

_KINDS = ("weight", "moment1", "moment2")


class _Body:
    """Live tensors, and nothing to add."""

    def __init__(self) -> None:
        self.tensors: dict[StateKey, Tensor] = {}

    def bind(self, tensors: Mapping[StateKey, Tensor], about: About) -> None:
        self.tensors = dict(tensors)

    def unbind(self) -> About:
        self.tensors = {}
        return {}


def run(options: BenchOptions) -> dict[str, object]:
    size = (96 << 20) if options.quick else (1 << 30) + (1 << 26)
    rounds = 4 if options.quick else 8
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="slackwater-switch-", dir=_disk_folder()) as folder:
        return _measured(options, Path(folder), size, rounds)


def _disk_folder() -> str | None:
    """A temporary folder that is on a disk, where /tmp is memory."""
    return os.environ.get("SLACKWATER_BENCH_DISK")


def _measured(options: BenchOptions, folder: Path, size: int, rounds: int) -> dict[str, object]:
    budgets = StateBudgets(size + (4 << 20), 2 * size + (8 << 20), 3 * size)
    manager = StateManager(budgets, folder)
    device = DeviceTier(manager, "trainer", budgets.device_bytes)
    manager.attach("trainer", device)
    elements = size // 4 // len(_KINDS)
    bodies: dict[str, _Body] = {}
    generator = torch.Generator().manual_seed(options.seed)
    sums: dict[str, int] = {}
    for job in "ab":
        parts = [
            StoredPart(StateKey(job, "net", "w", kind, 0, elements), "float32", 4)
            for kind in _KINDS
        ]
        bodies[job] = _Body()
        device.add(job, parts, bodies[job], warm=False)
        with device.use(job):
            for tensor in bodies[job].tensors.values():
                tensor.view(torch.int32).random_(generator=generator)
            sums[job] = _sum(bodies[job])
    state_bytes = manager.catalogue.entries["a"].stored.bytes
    options.progress("warm switches", 0.2)
    warm, copies = list[float](), list[float]()
    limit = _CopyLimit(state_bytes)
    for number in range(rounds):
        job = "ab"[number % 2]
        copies.append(limit.seconds())
        began_s = time.perf_counter()
        with device.use(job):
            warm.append(time.perf_counter() - began_s)
    options.progress("cold starts", 0.6)
    cold, reads = list[float](), list[float]()
    plain = _PlainRead(manager.disk, state_bytes)
    for job in "ab" * (1 if options.quick else 4):
        manager.evict("b" if job == "a" else "a", Tier.HOST)
        written_first, read_first = len(cold) & 2, len(cold) & 4
        if written_first:
            plain.write()
        manager.evict(job, Tier.DISK)
        if not written_first:
            plain.write()
        if read_first:
            reads.append(plain.seconds())
        began_s = time.perf_counter()
        with device.use(job):
            cold.append(time.perf_counter() - began_s)
            if _sum(bodies[job]) != sums[job]:
                raise AssertionError(f"the state of {job} differs after its moves")
        if not read_first:
            manager.disk.settle()
            reads.append(plain.seconds())
    direct = manager.disk.direct
    plain.close()
    device.close()
    manager.close()
    return _figures(state_bytes, warm, copies, cold, reads) | {"direct_io": direct}


def _figures(
    size: int, warm: list[float], copies: list[float], cold: list[float], reads: list[float]
) -> dict[str, object]:
    ratios = [one / other for one, other in zip(warm, copies, strict=True)]
    warm_s, cold_s = statistics.median(warm), statistics.median(cold)
    read_s = statistics.median(reads)
    return {
        "state_bytes": size,
        "warm_s": warm_s,
        "copy_s": statistics.median(copies),
        "warm_over_copy": statistics.median(ratios),
        "copy_gb_s": 2 * size / statistics.median(copies) / 1e9,
        "cold_s": cold_s,
        "cold_over_warm": cold_s / warm_s,
        "disk_read_gb_s": size / read_s / 1e9,
        "at_disk_limit": min(reads) / min(cold),
        "bits_equal": True,
    }


class _CopyLimit:
    """The same bytes, one state out and one in, between memories that have been touched before."""

    def __init__(self, size: int) -> None:
        self._image = HostImage.create("copy-limit", size)
        self._host = torch.from_numpy(self._image.data)
        self._device = torch.zeros(size, dtype=torch.uint8)

    def seconds(self) -> float:
        began_s = time.perf_counter()
        self._host.copy_(self._device)
        self._device.copy_(self._host)
        return time.perf_counter() - began_s


class _PlainRead:
    """A file like a state's, from end to end, in the same pieces by as many threads, without a
    check: what the disk gives.
    """

    def __init__(self, disk: DiskTier, size: int) -> None:
        self._disk = disk
        self._buffer = HostImage.create("read-limit", size)
        self._buffer.pages[:] = np.random.default_rng(0).integers(
            0, 256, len(self._buffer.pages), np.uint8
        )

    def write(self) -> None:
        """The file is new again."""
        self._disk.write("read-limit", self._buffer.pages, {})

    def seconds(self) -> float:
        pages, path = self._buffer.pages, self._disk.path("read-limit")
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if self._disk.direct else 0))

        def read(place: int) -> int:
            return os.preadv(descriptor, [pages[place : place + PIECE].data], place)

        try:
            began_s = time.perf_counter()
            with ThreadPoolExecutor(LANES) as pool:
                got = sum(pool.map(read, range(0, len(pages), PIECE)))
            took_s = time.perf_counter() - began_s
        finally:
            os.close(descriptor)
        if got != len(pages):
            raise OSError(f"{path}: {got} of {len(pages)} bytes were read")
        return took_s

    def close(self) -> None:
        self._buffer.close()


def _sum(body: _Body) -> int:
    total = 0
    for tensor in body.tensors.values():
        words = tensor.view(torch.int32).numpy()
        total = (total * 31 + int(np.bitwise_xor.reduce(words)) + int(words.sum())) & (2**64 - 1)
    return total
