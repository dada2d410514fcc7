"""Queues work for the event loop by tenant, and runs a step of each tenant in turn.

Each round takes at most a few milliseconds, so that connections and timers run in between. The
queue of a tenant that used more than its share waits while others are active.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from slackwater.model.ids import TenantId
from slackwater.runtime.services.loop_shares import LoopShares

T = TypeVar("T")

_SLICE_S = 0.002
_AND_ITS_END = 2.0  # what a step starts must also finish, which takes about as long again


class TenantQueues:
    """Only for the event loop's thread."""

    def __init__(self, shares: LoopShares, slice_s: float = _SLICE_S) -> None:
        self.shares = shares
        self._slice_s = slice_s
        self._queues: OrderedDict[TenantId, deque[Iterator[None]]] = OrderedDict()
        self._due: asyncio.Handle | None = None
        self._is_resting = False

    def put(self, tenant: TenantId, steps: Iterator[None]) -> None:
        """Append steps to the tenant's queue, and work in the next round of the event loop."""
        self._append(tenant, steps)
        if self._due is not None and self._is_resting:  # this tenant need not wait so long
            self._due.cancel()
            self._due = None
        if self._due is None:
            self._plan(0.0)

    def put_and_run(self, works: Iterable[tuple[TenantId, Iterator[None]]]) -> None:
        """Append all of these. One tenant's are begun now: a round of the event loop costs more
        than a short step. Of several tenants one could pass another, so they wait for the round.
        """
        if self.shares.is_shared:
            for tenant, steps in works:
                self.put(tenant, steps)
            return
        for tenant, steps in works:
            self._append(tenant, steps)
        if self._due is None and self._queues:
            try:
                self._work()
            except Exception as error:  # noqa: BLE001  (as of a callback: the caller lives on)
                told = {"message": "a request's step raised", "exception": error}
                asyncio.get_running_loop().call_exception_handler(told)

    def _append(self, tenant: TenantId, steps: Iterator[None]) -> None:
        self.shares.record_request(tenant)
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = deque()
        queue.append(steps)

    def each(self, tenant: TenantId, items: Iterable[T], work: Callable[[T], object]) -> None:
        """Queue one step per item."""
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
