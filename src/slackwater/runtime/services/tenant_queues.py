"""Work for the event loop, one queue per tenant: a step of one tenant after a step of another.

Each round of the loop takes a few milliseconds of it, so that connections and timers go between.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from slackwater.model.ids import TenantId

T = TypeVar("T")

_SLICE_S = 0.002


class TenantQueues:
    """Use from the event loop's thread alone."""

    def __init__(self, slice_s: float = _SLICE_S) -> None:
        self._slice_s = slice_s
        self._queues: OrderedDict[TenantId, deque[Iterator[None]]] = OrderedDict()
        self._is_due = False

    def put(self, tenant: TenantId, steps: Iterator[None]) -> None:
        """Take these steps after all that the tenant has waiting."""
        self._queues.setdefault(tenant, deque()).append(steps)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._work)

    def each(self, tenant: TenantId, items: Iterable[T], work: Callable[[T], object]) -> None:
        """A step for every item."""
        self.put(tenant, (None for item in items if work(item) or True))

    def _work(self) -> None:
        until_s = time.perf_counter() + self._slice_s
        try:
            while self._queues:
                self._step()
                if time.perf_counter() > until_s:
                    break
        finally:
            self._is_due = bool(self._queues)
            if self._is_due:
                asyncio.get_running_loop().call_soon(self._work)

    def _step(self) -> None:
        """One of the tenant that has waited longest."""
        tenant, queue = self._queues.popitem(last=False)
        steps = queue.popleft()
        try:
            if next(steps, self) is None:
                queue.appendleft(steps)
        finally:
            if queue:
                self._queues[tenant] = queue
