"""Detects that a service missed its SLO recently. Then it has no slack, even if the next step alone
has some, because work that a rollout delays adds to the next burst.
"""

from collections import deque

WINDOW_S = 30.0
LEAST_MISSES = 2  # a single miss says nothing about a share of many requests


class Overload:
    """Counts first tokens, and requests that missed the SLO. The SLO is broken if more than the
    allowed share of the requests in the last `window_s` missed it, and at least `LEAST_MISSES`.
    `is_broken` is one comparison, and any thread may call it.
    """

    def __init__(self, share: float, window_s: float = WINDOW_S) -> None:
        self._missable = 1.0 - share
        self._window_s = window_s
        self._requests: deque[float] = deque()
        self._misses: deque[float] = deque()
        self.until_s = float("-inf")

    def is_broken(self, now_s: float) -> bool:
        """Whether the SLO counts as broken now."""
        return now_s < self.until_s

    def record_answer(self, now_s: float, *, kept: bool) -> None:
        """Record the first token of a request; `kept` if it was in time."""
        self._requests.append(now_s)
        if not kept:
            self._misses.append(now_s)
        self._judge(now_s)

    def record_miss(self, now_s: float) -> None:
        """Record a request that missed the SLO after a first token in time."""
        self._misses.append(now_s)
        self._judge(now_s)

    def _judge(self, now_s: float) -> None:
        misses, requests = self._misses, self._requests
        for seen in (misses, requests):
            while seen and seen[0] <= now_s - self._window_s:
                seen.popleft()
        over = len(misses) > self._missable * len(requests)
        if over and len(misses) >= LEAST_MISSES:
            self.until_s = misses[-LEAST_MISSES] + self._window_s
        else:
            self.until_s = float("-inf")
