"""Background tasks, and waiting with a limit."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)


async def wait_until_set(event: asyncio.Event, limit_s: float) -> bool:
    """Wait for an event, at most `limit_s`; whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()


class Background:
    """Owns tasks; `failed` is called with the error of a task, which stops the service."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task died", exc_info=error)
            self._failed(error)

    async def drain(self, grace_s: float) -> None:
        """Wait for running tasks up to `grace_s`, then cancel them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
