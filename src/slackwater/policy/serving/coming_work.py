"""How much work may arrive within a window, learned from the arrivals seen so far."""

from bisect import bisect_left, insort
from collections import deque


class WorkForecast:
    """A quantile of the work that came within `window_s` before an arrival, itself included.

    Seen from a request, that is what stands before it in the queue if nothing was served meanwhile.
    The last `kept` arrivals count, so that it follows the hours of the day.
    """

    def __init__(self, window_s: float, share: float = 0.99, kept: int = 1024) -> None:
        self._window_s, self._share, self._kept = window_s, share, kept
        self._recent: deque[tuple[float, float]] = deque()
        self._recent_s = 0.0
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def arrived(self, now_s: float, work_s: float) -> None:
        """A request came that will take so long to prefill."""
        recent = self._recent
        recent.append((now_s, work_s))
        self._recent_s += work_s
        while recent[0][0] < now_s - self._window_s:
            self._recent_s -= recent.popleft()[1]
        seen_s = max(self._recent_s, work_s)
        self._order.append(seen_s)
        insort(self._sorted, seen_s)
        if len(self._order) > self._kept:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]

    @property
    def seconds(self) -> float:
        """The quantile; 0 before the first arrival."""
        if not self._sorted:
            return 0.0
        return self._sorted[min(int(self._share * len(self._sorted)), len(self._sorted) - 1)]
