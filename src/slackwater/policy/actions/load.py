"""Running averages of a lane's short actions and of arriving elastic actions. They tell how many
others would wait if an elastic action took every core: tool calls of many trajectories, and later
elastic actions.
"""

import math

_LEAST_SLACK = 0.1  # a queue that never empties counts as one that empties slowly


class ElasticLoad:
    """The rate of arriving elastic actions and of their work, averaged over about `memory_s`."""

    def __init__(self, memory_s: float = 60.0) -> None:
        self._memory_s = memory_s
        self._first_s: float | None = None
        self._last_s = 0.0
        self._count = 0.0
        self._work_s = 0.0

    def record_arrival(self, work_s: float, now_s: float) -> None:
        """Record the arrival of an action with `work_s` unit-seconds of work."""
        if self._first_s is None:
            self._first_s = now_s
        self._fade(now_s)
        self._count += 1.0
        self._work_s += work_s

    def _fade(self, now_s: float) -> None:
        keep = math.exp(-(now_s - self._last_s) / self._memory_s)
        self._count *= keep
        self._work_s *= keep
        self._last_s = now_s

    def expect_arrivals(self, backlog_s: float, capacity: int, now_s: float) -> float:
        """How many actions will arrive while `capacity` units finish the backlog and what arrives
        meanwhile. It looks ahead by at most `memory_s`.
        """
        if self._first_s is None or capacity <= 0:
            return 0.0
        self._fade(now_s)
        seen_s = self._memory_s * (1 - math.exp(-(now_s - self._first_s) / self._memory_s))
        seen_s = max(seen_s, 1.0)
        load = self._work_s / seen_s / capacity
        empty_s = backlog_s / (capacity * max(1 - load, _LEAST_SLACK))
        return self._count / seen_s * min(empty_s, self._memory_s)


class LoadAverage:
    """The number of busy units over time, averaged with a memory of `memory_s` seconds."""

    def __init__(self, memory_s: float = 30.0) -> None:
        self._memory_s = memory_s
        self._since_s: float | None = None
        self._mean = 0.0
        self.busy = 0

    def change(self, units: int, now_s: float) -> None:
        """Change the number of busy units from now on."""
        if self._since_s is not None:
            keep = math.exp(-(now_s - self._since_s) / self._memory_s)
            self._mean = keep * self._mean + (1 - keep) * self.busy
        self._since_s = now_s
        self.busy += units

    def reserve(self) -> int:
        """How many units to keep free for the usual load, beyond those that are busy now."""
        return max(math.ceil(self._mean) - self.busy, 0) if self._mean >= 0.05 else 0
