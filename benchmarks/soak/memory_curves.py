"""The memory of every process of a service over time, as the system accounts for it.

The KV cache is kept apart: its bound is the operator's (`--kv-mb`), and how much of it is in use
follows the load.
"""

import statistics
import time
from dataclasses import dataclass, field

import psutil

from benchmarks.processor_use import PLANE, role_of

MIB = 1 << 20
_KV_CACHE = "memfd:slackwater-kv"
_EDGE_S = 60.0  # a figure is the median over so long: one sample may fall on a passing buffer


@dataclass(slots=True)
class MemoryCurves:
    """Follows a service by its process id. A process that ended keeps its curve."""

    service: int
    began_s: float = field(default_factory=time.monotonic)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    living: set[str] = field(default_factory=set)
    kv_cache_mib: dict[str, float] = field(default_factory=dict)

    def sample(self) -> None:
        """Add a point (seconds, MiB) for each process that lives now."""
        at_s = round(time.monotonic() - self.began_s, 1)
        self.living = set()
        try:
            root = psutil.Process(self.service)
            found = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in found:
            try:
                role = PLANE if process.pid == self.service else role_of(process)
                if role == "others":  # an action's, for a moment
                    continue
                cache_mib = _kv_cache_bytes(process) / MIB if role == "engine" else 0.0
                resident_mib = process.memory_info().rss / MIB - cache_mib
            except psutil.NoSuchProcess:
                continue
            name = f"{role}-{process.pid}"
            self.curves.setdefault(name, []).append((at_s, round(resident_mib, 1)))
            if cache_mib:
                self.kv_cache_mib[name] = max(self.kv_cache_mib.get(name, 0.0), round(cache_mib, 1))
            self.living.add(name)

    def growth(self, since_s: float) -> dict[str, float]:
        """By process that lived from `since_s` to the end: its memory then over its memory at
        `since_s`.
        """
        found = {}
        for name in sorted(self.living):
            curve = self.curves[name]
            last_s = curve[-1][0]
            before = [mib for at_s, mib in curve if since_s <= at_s <= since_s + _EDGE_S]
            after = [mib for at_s, mib in curve if at_s >= last_s - _EDGE_S]
            if before and curve[0][0] <= since_s:
                found[name] = statistics.median(after) / statistics.median(before)
        return found


def _kv_cache_bytes(process: psutil.Process) -> int:
    maps = process.memory_maps(grouped=True)
    return sum(found.rss for found in maps if _KV_CACHE in found.path)
