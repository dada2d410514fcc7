"""The memory of every process of a service over time, as the system accounts for it."""

import statistics
import time
from dataclasses import dataclass, field

import psutil

from benchmarks.processor_use import PLANE, role_of

MIB = 1 << 20
_EDGE_S = 60.0  # a figure is the median over so long: one sample may fall on a passing buffer


@dataclass(slots=True)
class MemoryCurves:
    """Follows a service by its process id. A process that ended keeps its curve."""

    service: int
    began_s: float = field(default_factory=time.monotonic)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    living: set[str] = field(default_factory=set)

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
                resident_mib = process.memory_info().rss / MIB
            except psutil.NoSuchProcess:
                continue
            if role == "others":  # an action's, for a moment
                continue
            name = f"{role}-{process.pid}"
            self.curves.setdefault(name, []).append((at_s, round(resident_mib, 1)))
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
