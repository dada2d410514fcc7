"""How many elastic actions will come before the queue is empty again: they too wait for every unit
that is taken now.
"""

import math

_LEAST_SLACK = 0.1  # a queue that never empties is as bad as one that empties slowly


class ElasticLoad:
    """How many elastic actions come, and how much work with them, over the last `memory_s` seconds
    or so.
    """

    def __init__(self, memory_s: float = 60.0) -> None:
        self._memory_s = memory_s
        self._first_s: float | None = None
        self._last_s = 0.0
        self._count = 0.0
        self._work_s = 0.0

    def arrived(self, work_s: float, now_s: float) -> None:
        """One more, with so many unit-seconds to do."""
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

    def soon(self, backlog_s: float, capacity: int, now_s: float) -> float:
        """How many come while a backlog of so many unit-seconds is worked off by `capacity` units,
        with what comes meanwhile.

        Looks no further ahead than its memory goes back.
        """
        if self._first_s is None or capacity <= 0:
            return 0.0
        self._fade(now_s)
        seen_s = self._memory_s * (1 - math.exp(-(now_s - self._first_s) / self._memory_s))
        seen_s = max(seen_s, 1.0)
        load = self._work_s / seen_s / capacity
        empty_s = backlog_s / (capacity * max(1 - load, _LEAST_SLACK))
        return self._count / seen_s * min(empty_s, self._memory_s)
