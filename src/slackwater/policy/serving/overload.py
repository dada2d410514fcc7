"""Whether a service breaks its promise lately: then it has no slack, whatever the next step's slack
says, since work that a rollout puts off comes back in the next burst.
"""

from collections import deque

WINDOW_S = 30.0
LEAST_MISSES = 2  # one request alone says nothing about a share of many


class Overload:
    """Counts first tokens and late ones. The promise is broken if more than the promised share of
    the last requests missed, and at least `LEAST_MISSES`. Looking costs one comparison, and any
    thread may look.
    """

    def __init__(self, share: float, window_s: float = WINDOW_S) -> None:
        self._missable = 1.0 - share
        self._window_s = window_s
        self._requests: deque[float] = deque()
        self._misses: deque[float] = deque()
        self.until_s = float("-inf")

    def is_broken(self, now_s: float) -> bool:
        """Whether the promise counts as broken now."""
        return now_s < self.until_s

    def record_answer(self, now_s: float, *, kept: bool) -> None:
        """A request had its first token, in time or not."""
        self._requests.append(now_s)
        if not kept:
            self._misses.append(now_s)
        self._judge(now_s)

    def record_miss(self, now_s: float) -> None:
        """A request whose first token was in time broke the promise after it."""
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
