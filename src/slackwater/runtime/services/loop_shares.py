"""Shares the event loop's time and its threads between tenants. Only for the loop's thread.

A tenant that recently used more than its share waits. The steps of its requests (`metered`) and all
else that is done for it (`spent`) are counted: what its streams write, its work on threads, and in
a front end what the control plane did for it. With others active a tenant may have two fifths of a
processor; for what it had beyond that it waits (`turn`), one request at a time, until the debt is
paid. Alone it never waits longer than a round of the loop.
"""

import asyncio
import contextlib
import os
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
_SLICE_S = 0.002
_AND_ITS_END = 2.0  # what a step starts must also finish, which takes about as long again


class LoopShares:
    """What each tenant used and owes."""

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
        if self.is_shared:
            self._last_request_s[tenant] = self._clock()

    def is_contended(self, tenant: TenantId) -> bool:
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
        """Wait until the tenant may continue; in debt, at least one round of the loop."""
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


class TenantQueues:
    """Queues work for the event loop by tenant, and runs a step of each tenant in turn.

    Each round takes at most a few milliseconds, so that connections and timers run in between. The
    queue of a tenant that used more than its share waits while others are active.
    """

    def __init__(self, shares: LoopShares, slice_s: float = _SLICE_S) -> None:
        self.shares = shares
        self._slice_s = slice_s
        self._queues: OrderedDict[TenantId, deque[Iterator[None]]] = OrderedDict()
        self._due: asyncio.Handle | None = None
        self._is_resting = False

    def put(self, tenant: TenantId, steps: Iterator[None]) -> None:
        self.shares.record_request(tenant)
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = deque()
        queue.append(steps)
        if self._due is not None and self._is_resting:  # this tenant need not wait so long
            self._due.cancel()
            self._due = None
        if self._due is None:
            self._plan(0.0)

    def each(self, tenant: TenantId, items: Iterable[T], work: Callable[[T], object]) -> None:
        self.put(tenant, (None for item in items if work(item) or True))

    def _work(self) -> None:
        self._due = None
        until_s = time.perf_counter() + self._slice_s
        shares, rest_s = self.shares, 0.0
        try:
            while self._queues:
                if shares.is_shared:
                    tenant = min(self._queues, key=shares.delay_s)
                    rest_s = shares.delay_s(tenant)
                    if rest_s > 0:
                        break
                else:
                    tenant = next(iter(self._queues))
                self._step(tenant)
                if time.perf_counter() > until_s:
                    break
        finally:
            if self._queues:
                self._plan(rest_s)

    def _plan(self, rest_s: float) -> None:
        loop, self._is_resting = asyncio.get_running_loop(), rest_s > 0
        self._due = loop.call_later(rest_s, self._work) if rest_s else loop.call_soon(self._work)

    def _step(self, tenant: TenantId) -> None:
        queue = self._queues.pop(tenant)
        steps = queue.popleft()
        is_charged = self.shares.is_shared  # else it need not be timed, which is a system call
        began_s = time.thread_time() if is_charged else 0.0
        try:
            if next(steps, self) is None:
                queue.appendleft(steps)
        finally:
            if is_charged:
                self.shares.charge_step(tenant, time.thread_time() - began_s, _AND_ITS_END)
            if queue:
                self._queues[tenant] = queue


class FairWork:
    """Runs work that would block the event loop on a few threads, with the tenants in turn.

    Examples are tokenising a long text and encoding a long answer. With several tenants none may
    use all threads, so that an idle tenant starts at once. Thread time is charged to the tenant.
    """

    def __init__(self, shares: LoopShares, threads: int | None = None) -> None:
        self._shares = shares
        threads = threads or min(max(os.cpu_count() or 1, 2), 4)
        most_each = max(threads - 1, 1) if shares.is_shared else threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fair-work")
        self._slots = defaultdict[TenantId, asyncio.Semaphore](lambda: asyncio.Semaphore(most_each))

    async def run(self, tenant: TenantId, work: Callable[..., T], *arguments: Any) -> T:
        """Run work in the tenant's turn, unless its waiter was cancelled before."""
        loop, slots, used_s = asyncio.get_running_loop(), self._slots[tenant], 0.0

        def measure() -> T:
            nonlocal used_s
            began_s = time.thread_time()
            try:
                return work(*arguments)
            finally:
                used_s = time.thread_time() - began_s

        def free() -> None:
            slots.release()
            self._shares.charge(tenant, used_s)

        def release(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(free)

        await slots.acquire()
        try:
            await self._shares.wait_turn(tenant)
        except BaseException:
            slots.release()
            raise
        running = self._pool.submit(measure)
        # Not earlier: the thread is busy even if the waiter was cancelled.
        running.add_done_callback(release)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
