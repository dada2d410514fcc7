"""Limits no worker brings: on concurrency, on use per window of time, or both (ARL-Tangram 5.1).

An action waits for its quota instead of failing against it, so there are no storms of retries.
"""

from collections import deque
from typing import NamedTuple

from slackwater.model.action import Limit
from slackwater.model.ids import TenantId

_GUARD_S = 1e-6  # sums of seconds are rounded: no window may be short by that


class LimitClaim(NamedTuple):
    """Who waits for a limit: its place in its tenant's line, and when it came."""

    place: tuple[float, int]
    tenant: TenantId
    came: tuple[float, int]

    def before(self, other: "LimitClaim") -> bool:
        """A tenant's priorities order its own actions; between tenants it counts who came first."""
        if self.tenant == other.tenant:
            return self.place < other.place
        return self.came < other.came


class LimitBook:
    """What is in use of one limit. A unit of quota comes back `window_s` after it was used."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.running = 0
        self.recent = 0
        self.blocked: dict[str, LimitClaim] = {}  # lane -> the first that waits for it
        self._used: deque[tuple[float, int]] = deque()  # when the units come back, and how many

    def change(self, limit: Limit) -> None:
        """New bounds from now on; what was used keeps the window under which it was used."""
        self.limit = limit

    def ever_fits(self, units: int) -> bool:
        return units <= (self.limit.concurrency or units) and units <= (self.limit.quota or units)

    def fits(self, units: int, now_s: float) -> bool:
        self._forget(now_s)
        at_once, quota = self.limit.concurrency, self.limit.quota
        return (at_once is None or self.running + units <= at_once) and (
            quota is None or self.recent + units <= quota
        )

    def claimed_before(self, lane: str, claim: LimitClaim) -> bool:
        """Whether an earlier action in another lane waits for it; later ones must not take it."""
        return any(first.before(claim) for other, first in self.blocked.items() if other != lane)

    def take(self, units: int, now_s: float) -> None:
        assert self.fits(units, now_s), f"{self.limit.resource}: {units} units do not fit"
        self.running += units
        if self.limit.quota is not None and units:
            self.recent += units
            self._used.append((now_s + self.limit.window_s + _GUARD_S, units))

    def give_back(self, units: int) -> None:
        """An action ended: the place is free; its quota stays used."""
        self.running -= units

    def returns_s(self, units: int, now_s: float) -> float | None:
        """When the quota for so many returns; None if they do not wait for the quota."""
        self._forget(now_s)
        quota = self.limit.quota
        if quota is None or self.recent + units <= quota:
            return None
        missing = self.recent + units - quota
        for back_s, used in self._used:
            missing -= used
            if missing <= 0:
                return back_s
        return None

    def _forget(self, now_s: float) -> None:
        while self._used and self._used[0][0] <= now_s:
            self.recent -= self._used.popleft()[1]

    def check_integrity(self) -> None:
        assert self.running >= 0
        assert self.recent == sum(units for _, units in self._used)
