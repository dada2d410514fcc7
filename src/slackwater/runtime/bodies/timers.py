"""Named timers: setting one again replaces it."""

import asyncio
from collections.abc import Callable

_HELD_UP_S = 1.0
_HEARING_S = 0.2


class Timers:
    """Calls back on the event loop."""

    def __init__(self, fired: Callable[[str], None]) -> None:
        self._fired = fired
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def set(self, name: str, at_s: float) -> None:
        """Fire at `at_s` on the loop's clock; a time that is past fires as soon as it can."""
        self.cancel(name)
        loop = asyncio.get_running_loop()
        self._handles[name] = loop.call_at(at_s, self._due, name, at_s)

    def cancel(self, name: str) -> None:
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.cancel()

    def cancel_all(self) -> None:
        for name in list(self._handles):
            self.cancel(name)

    def _due(self, name: str, at_s: float) -> None:
        """Fire; but if the loop was held up, let it first hear what came meanwhile (nobody is silent then)."""
        loop = asyncio.get_running_loop()
        if loop.time() - at_s > _HELD_UP_S:
            self._handles[name] = loop.call_later(_HEARING_S, self._fire, name)
        else:
            self._fire(name)

    def _fire(self, name: str) -> None:
        del self._handles[name]
        self._fired(name)
