"""Actions for synchronous code: an action client on its own thread, returning futures."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from slackwater.rl.actions import ActionClient

T = TypeVar("T")


class ActionThread:
    """`with ActionThread(url, key) as actions: actions.do(lambda c: c.run("true")).result()`"""

    def __init__(self, url: str, key: str, *, job: str = "default") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="actions", daemon=True)
        self._client = ActionClient(url, key, job=job)

    def __enter__(self) -> "ActionThread":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give up what is under way."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _close(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.__aexit__(None, None, None)

    def do(self, work: Callable[[ActionClient], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Begin some work with the client; its result comes in a future."""
        return asyncio.run_coroutine_threadsafe(work(self._client), self._loop)
