"""How long one kind of phase of a job takes lately."""

from collections import deque

_LAST = 3
_WEIGHT = 0.25  # of the newest


class RecentLength:
    """A moving mean over the middle one of the last three lengths.

    One long phase says nothing yet: the first one starts everything, an engine may have died in
    another. Two that follow each other do.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_LAST)
        self._mean_s: float | None = None

    @property
    def lately_s(self) -> float | None:
        """None until a second phase bears out the first."""
        return self._mean_s

    def observe(self, work_s: float) -> None:
        """One more phase took so long."""
        self._last.append(work_s)
        if len(self._last) == 1:
            return
        middle_s = sorted(self._last)[(len(self._last) - 1) // 2]  # of two the shorter
        last_s = self._mean_s if self._mean_s is not None else middle_s
        self._mean_s = last_s + _WEIGHT * (middle_s - last_s)
