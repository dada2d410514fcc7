"""Named timers: setting one again replaces it."""

import asyncio
from collections.abc import Callable


class Timers:
    """Calls back on the event loop."""

    def __init__(self, fired: Callable[[str], None]) -> None:
        self._fired = fired
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def set(self, name: str, at_s: float) -> None:
        """Fire at `at_s` on the loop's clock; a time that is past fires as soon as it can."""
        self.cancel(name)
        loop = asyncio.get_running_loop()
        self._handles[name] = loop.call_at(at_s, self._fire, name)

    def cancel(self, name: str) -> None:
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.cancel()

    def cancel_all(self) -> None:
        for name in list(self._handles):
            self.cancel(name)

    def _fire(self, name: str) -> None:
        del self._handles[name]
        self._fired(name)
