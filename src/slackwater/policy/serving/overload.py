"""Whether a service breaks its promise lately: then nothing is lent, whoever is to blame.

A service that misses more requests than its promise allows has no slack, whatever the slack of the
next step says: work that a rollout puts off comes back in the next burst.
"""

from collections import deque
from dataclasses import dataclass

from slackwater.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OverloadRule:
    """Broken: more than the promised share of the requests of the last `window_s` missed, and at
    least `least_misses`, since one request alone says nothing about a share of many.
    """

    window_s: float = 30.0
    least_misses: int = 2

    def __post_init__(self) -> None:
        if not self.window_s > 0:
            raise ConfigError.of("overload: window_s", self.window_s, "must be above 0")
        if self.least_misses < 1:
            raise ConfigError.of("overload: least_misses", self.least_misses, "must be at least 1")


class Overload:
    """Counts first tokens and late ones. Looking costs one comparison, and any thread may look."""

    def __init__(self, share: float, rule: OverloadRule | None = None) -> None:
        self._missable = 1.0 - share
        self._rule = rule or OverloadRule()
        self._requests: deque[float] = deque()
        self._misses: deque[float] = deque()
        self.until_s = float("-inf")

    def broken(self, now_s: float) -> bool:
        """Whether the promise counts as broken now."""
        return now_s < self.until_s

    def answered(self, now_s: float, *, kept: bool) -> None:
        """A request had its first token, in time or not."""
        self._requests.append(now_s)
        if not kept:
            self._misses.append(now_s)
        self._judge(now_s)

    def missed(self, now_s: float) -> None:
        """A request whose first token was in time broke the promise after it."""
        self._misses.append(now_s)
        self._judge(now_s)

    def _judge(self, now_s: float) -> None:
        rule, misses, requests = self._rule, self._misses, self._requests
        for seen in (misses, requests):
            while seen and seen[0] <= now_s - rule.window_s:
                seen.popleft()
        over = len(misses) > self._missable * len(requests)
        if over and len(misses) >= rule.least_misses:
            self.until_s = misses[-rule.least_misses] + rule.window_s
        else:
            self.until_s = float("-inf")
