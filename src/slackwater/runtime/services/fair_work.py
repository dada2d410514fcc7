"""Work that would hold up the event loop, on a few threads, with every tenant in turn.

Tokenising a long text, decoding a large batch or writing a long answer takes longer than others may
wait. With several tenants none may have all threads, so that an idle tenant starts at once, and a
thread's time is its tenant's (`LoopShares`).
"""

import asyncio
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from slackwater.model.ids import TenantId
from slackwater.runtime.services.loop_shares import LoopShares

T = TypeVar("T")


class FairWork:
    """Use from the event loop's thread alone."""

    def __init__(self, shares: LoopShares, threads: int | None = None) -> None:
        self._shares = shares
        threads = threads or min(max(os.cpu_count() or 1, 2), 4)
        most_each = max(threads - 1, 1) if shares.is_shared else threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fair-work")
        self._slots = defaultdict[TenantId, asyncio.Semaphore](lambda: asyncio.Semaphore(most_each))

    async def run(self, tenant: TenantId, work: Callable[..., T], *arguments: Any) -> T:
        """The work's result, in the tenant's turn; work whose waiter has left is not begun."""
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
        running.add_done_callback(release)  # not before, though its waiter may leave
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
