"""Runs work that would block the event loop on a few threads, with the tenants in turn.

Examples are tokenising a long text and encoding a long answer. With several tenants none may use
all threads, so that an idle tenant starts at once. Thread time is charged to the tenant
(`LoopShares`).
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
    """Only for the event loop's thread."""

    def __init__(self, shares: LoopShares, threads: int | None = None) -> None:
        self._shares = shares
        threads = threads or min(max(os.cpu_count() or 1, 2), 4)
        most_each = max(threads - 1, 1) if shares.is_shared else threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fair-work")
        self._slots = defaultdict[TenantId, asyncio.Semaphore](lambda: asyncio.Semaphore(most_each))

    async def run(self, tenant: TenantId, work: Callable[..., T], *arguments: Any) -> T:
        """Run work when it is the tenant's turn. Work whose waiter was cancelled before
        is skipped.
        """
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
