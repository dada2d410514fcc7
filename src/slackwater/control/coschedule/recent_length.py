"""The recent length of one kind of phase of a job."""

from collections import deque

_LAST = 3
_WEIGHT = 0.25  # of the newest median in the mean


class RecentLength:
    """`mean_s` is a moving mean of the median of the last three lengths; None before the second.

    The median ignores a single long phase: the first one starts everything, and in another an
    engine may have died. Two long phases in a row count.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_LAST)
        self.mean_s: float | None = None

    def observe(self, work_s: float) -> None:
        self._last.append(work_s)
        if len(self._last) == 1:
            return
        middle_s = sorted(self._last)[(len(self._last) - 1) // 2]  # of two the shorter
        before_s = middle_s if self.mean_s is None else self.mean_s
        self.mean_s = before_s + _WEIGHT * (middle_s - before_s)
