"""Limits connections that have not authenticated, in number and in time.

Beyond the limit the oldest is closed. A worker authenticates within milliseconds, so that peers
that hold connections open cannot keep it out.
"""

import asyncio
from collections.abc import Callable

from slackwater.wire.proof import STRANGER_S

MOST_STRANGERS = 128


class UnprovenPeers:
    """Closes what does not prove itself within `within_s`, or is the oldest of more than `most`."""

    def __init__(self, most: int = MOST_STRANGERS, within_s: float = STRANGER_S) -> None:
        self._most = most
        self._within_s = within_s
        self._open: dict[object, tuple[Callable[[], object], asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, who: object) -> bool:
        return who in self._open

    def add(self, who: object, close: Callable[[], object]) -> None:
        """A connection was opened; `close` must end it. For a known one only that changes."""
        if who in self._open:
            self._open[who] = (close, self._open[who][1])
            return
        if len(self._open) >= self._most:
            self._close(next(iter(self._open)))
        loop = asyncio.get_running_loop()
        self._open[who] = (close, loop.call_later(self._within_s, self._close, who))

    def remove(self, who: object) -> None:
        """It has proved itself, or is gone."""
        found = self._open.pop(who, None)
        if found is not None:
            found[1].cancel()

    def _close(self, who: object) -> None:
        found = self._open.pop(who, None)
        if found is not None:
            close, timer = found
            timer.cancel()
            close()
