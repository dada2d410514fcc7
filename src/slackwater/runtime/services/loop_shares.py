"""Shares the event loop's time between tenants: one that recently used more than its share waits.

The steps of a tenant's requests (`metered`) and all else that is done for it (`spent`) are counted:
what its streams write, its work on threads, and in a front end what the control plane did for it.
With others active a tenant may have two fifths of a processor; for what it had beyond that it waits
(`turn`), one request at a time, until the debt is paid. Alone it never waits longer than a round of
the loop.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from slackwater.model.ids import TenantId

T = TypeVar("T")

ACTIVE_S = 2.0  # a tenant is about for so long after its last request came
_SHARE = 0.4
_ALLOWED_S = 0.001  # that may be owed
# uvloop's timers count milliseconds and a shorter rest does not sleep: it took a third of the
# control plane's time.
_LEAST_REST_S = 0.002
_MOST_OWED_S = 0.05
_LONGEST_STEP_S = 0.005  # more is a collection of garbage, whoever's step it came in


class LoopShares:
    """Only for the event loop's thread."""

    def __init__(
        self,
        tenants: int,
        active_s: float = ACTIVE_S,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`used` is the loop's processor time: who was kept waiting is not charged for it."""
        self.is_shared = tenants > 1
        self._active_s = active_s
        self._clock, self._cpu_clock = clock, cpu_clock
        self._last_request_s: dict[TenantId, float] = {}
        self._debts: dict[TenantId, tuple[float, float]] = {}
        self.totals: defaultdict[TenantId, float] = defaultdict(float)  # seconds, ever
        self._locks: defaultdict[TenantId, asyncio.Lock] = defaultdict(asyncio.Lock)

    def record_request(self, tenant: TenantId) -> None:
        """The tenant sent a request."""
        if self.is_shared:
            self._last_request_s[tenant] = self._clock()

    def is_contended(self, tenant: TenantId) -> bool:
        """Whether other tenants are active too."""
        if not self.is_shared:
            return False
        since_s = self._clock() - self._active_s
        return any(
            name != tenant and seen_s > since_s for name, seen_s in self._last_request_s.items()
        )

    def charge(self, tenant: TenantId, seconds: float) -> None:
        """Charge time to the tenant, which counts as active."""
        if not self.is_shared:
            return
        self.totals[tenant] += seconds
        now_s = self._last_request_s[tenant] = self._clock()
        self._debts[tenant] = (min(self._balance_s(tenant, now_s) + seconds, _MOST_OWED_S), now_s)

    def charge_step(self, tenant: TenantId, seconds: float, times: float = 1.0) -> None:
        """Charge one step; a longer one than usual is a garbage collection, which is nobody's."""
        self.charge(tenant, times * min(seconds, _LONGEST_STEP_S))

    async def wait_turn(self, tenant: TenantId) -> None:
        """Wait until the tenant may continue. A tenant in debt waits at least one round of the
        loop.
        """
        if self.is_shared and (self._locks[tenant].locked() or self._debt_s(tenant) > 0):
            async with self._locks[tenant]:
                await asyncio.sleep(0)
                rest_s = self.delay_s(tenant)
                while rest_s > 0:
                    await asyncio.sleep(rest_s)
                    rest_s = self.delay_s(tenant)  # streams spend without waiting for a turn

    async def meter(self, tenant: TenantId, work: Coroutine[Any, Any, T]) -> T:
        """Await work and charge the time of its steps to the tenant."""
        if not self.is_shared:
            return await work
        return await _MeteredCoroutine(
            work, self._cpu_clock, lambda took_s: self.charge_step(tenant, took_s)
        )

    def delay_s(self, tenant: TenantId) -> float:
        """Seconds that a tenant in debt rests; 0 if it has none or no other tenant is active."""
        debt_s = self._debt_s(tenant)
        if debt_s <= 0 or not self.is_contended(tenant):
            return 0.0
        return max(debt_s / _SHARE, _LEAST_REST_S)

    def _balance_s(self, tenant: TenantId, now_s: float) -> float:
        owed_s, at_s = self._debts.get(tenant, (0.0, now_s))
        return max(owed_s - _SHARE * (now_s - at_s), 0.0)

    def _debt_s(self, tenant: TenantId) -> float:
        return max(self._balance_s(tenant, self._clock()) - _ALLOWED_S, 0.0)


class _MeteredCoroutine(Generic[T]):
    """Runs a coroutine as `await` does, and reports how long each of its steps took."""

    def __init__(
        self,
        work: Coroutine[Any, Any, T],
        clock: Callable[[], float],
        tell: Callable[[float], None],
    ) -> None:
        self._work, self._clock, self._tell = work, clock, tell

    def __await__(self) -> Generator[Any, None, T]:
        raised: BaseException | None = None
        while True:
            began_s = self._clock()
            try:
                waits_for = self._work.send(None) if raised is None else self._work.throw(raised)
            except StopIteration as done:
                result: T = done.value
                return result
            finally:
                self._tell(self._clock() - began_s)
            try:
                yield waits_for
                raised = None
            except BaseException as error:  # noqa: BLE001  (the work gets it)
                raised = error
