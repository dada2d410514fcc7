"""Limits of concurrency or use per time window on resources without a worker (ARL-Tangram 5.1).
Actions wait for their quota: there are no storms of retries.
"""

from collections import deque
from typing import NamedTuple

from slackwater.model.action import Limit
from slackwater.model.ids import TenantId

_GUARD_S = 1e-6  # rounding of sums of seconds must not shorten a window


class LimitClaim(NamedTuple):
    """A queued action's claim on a limit: its position in its tenant's queue, and its arrival."""

    position: tuple[float, int]
    tenant: TenantId
    arrival: tuple[float, int]

    def is_before(self, other: "LimitClaim") -> bool:
        """Priorities order a tenant's own actions; between tenants the arrival decides."""
        if self.tenant == other.tenant:
            return self.position < other.position
        return self.arrival < other.arrival


class LimitUsage:
    """Current use of one limit. A unit of quota becomes free `window_s` after it was used."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.running = 0
        self.recent = 0
        self.first_claims: dict[str, LimitClaim] = {}  # by lane
        self._expiries: deque[tuple[float, int]] = deque()  # (when, how many) units become free

    def ever_fits(self, units: int) -> bool:
        return units <= (self.limit.concurrency or units) and units <= (self.limit.quota or units)

    def fits(self, units: int, now_s: float) -> bool:
        self._expire(now_s)
        at_once, quota = self.limit.concurrency, self.limit.quota
        return (at_once is None or self.running + units <= at_once) and (
            quota is None or self.recent + units <= quota
        )

    def has_earlier_claim(self, lane: str, claim: LimitClaim) -> bool:
        """Whether an earlier action in another lane waits for it: no later one may take it."""
        return any(first.is_before(claim) for at, first in self.first_claims.items() if at != lane)

    def take(self, units: int, now_s: float) -> None:
        assert self.fits(units, now_s), f"{self.limit.resource}: {units} units do not fit"
        self.running += units
        if self.limit.quota is not None and units:
            self.recent += units
            self._expiries.append((now_s + self.limit.window_s + _GUARD_S, units))

    def give_back(self, units: int) -> None:
        """An action ended: its concurrency is free, its quota stays used."""
        self.running -= units

    def available_s(self, units: int, now_s: float) -> float | None:
        """When quota for `units` becomes free; None if it does not lack quota."""
        self._expire(now_s)
        quota = self.limit.quota
        if quota is None or self.recent + units <= quota:
            return None
        missing = self.recent + units - quota
        for free_s, used in self._expiries:
            missing -= used
            if missing <= 0:
                return free_s
        return None

    def _expire(self, now_s: float) -> None:
        while self._expiries and self._expiries[0][0] <= now_s:
            self.recent -= self._expiries.popleft()[1]
