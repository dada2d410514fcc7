"""Runs a few callbacks per round of the event loop, so that other ready work goes between."""

import asyncio
from collections import deque
from collections.abc import Callable


class LoopThrottle:
    """In the order in which they came. Use from the event loop's thread alone."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def put(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        self._go_on()

    def _go_on(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._some)

    def _some(self) -> None:
        self._is_due = False
        try:
            for _ in range(min(self._at_once, len(self._waiting))):
                self._waiting.popleft()()
        finally:
            self._go_on()
