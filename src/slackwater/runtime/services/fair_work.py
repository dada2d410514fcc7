"""Work that would hold up the event loop, on a few threads, with every tenant in turn.

Tokenising a long text, decoding a large batch or writing a long answer takes longer than others may
wait. With several tenants none may have all threads, so that an idle tenant starts at once.
"""

import asyncio
import contextlib
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from slackwater.model.ids import TenantId

T = TypeVar("T")


class FairWork:
    """Use from the event loop's thread alone."""

    def __init__(self, tenants: int, threads: int | None = None) -> None:
        threads = threads or min(max(os.cpu_count() or 1, 2), 4)
        self._most_each = threads if tenants < 2 else max(threads - 1, 1)
        self._idle = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fair-work")
        self._lines: OrderedDict[TenantId, deque[_Piece]] = OrderedDict()
        self._running: Counter[TenantId] = Counter()

    async def run(self, tenant: TenantId, work: Callable[..., T], *arguments: Any) -> T:
        """The work's result, in the tenant's turn; work whose waiter has left is not begun."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[T] = loop.create_future()
        self._lines.setdefault(tenant, deque()).append((waiting, work, arguments))
        self._start(loop)
        return await waiting

    def waiting(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._idle and (tenant := self._next()) is not None:
            line = self._lines[tenant]
            waiting, work, arguments = line.popleft()
            self._lines.move_to_end(tenant)
            if not line:
                del self._lines[tenant]
            if waiting.done():
                continue
            self._idle -= 1
            self._running[tenant] += 1
            tell = partial(self._tell, loop, tenant, waiting)
            self._pool.submit(work, *arguments).add_done_callback(tell)

    def _tell(
        self,
        loop: asyncio.AbstractEventLoop,
        tenant: TenantId,
        waiting: "asyncio.Future[Any]",
        done: "Future[Any]",
    ) -> None:
        """On the thread that did the work."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._over, loop, tenant, waiting, done)

    def _next(self) -> TenantId | None:
        able = (tenant for tenant in self._lines if self._running[tenant] < self._most_each)
        return next(able, None)

    def _over(
        self,
        loop: asyncio.AbstractEventLoop,
        tenant: TenantId,
        waiting: "asyncio.Future[Any]",
        done: "Future[Any]",
    ) -> None:
        self._idle += 1
        self._running[tenant] -= 1
        if not waiting.done() and not done.cancelled():
            error = done.exception()
            if error is None:
                waiting.set_result(done.result())
            else:
                waiting.set_exception(error)
        self._start(loop)


_Piece = tuple["asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]
