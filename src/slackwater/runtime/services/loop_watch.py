"""Measures how long the event loop was blocked, in CPU and wall time, between two ticks of a timer.

CPU time is the service's own code; the rest is waiting for a processor or for Python's lock. An
idle loop is checked less often, since each tick wakes the process.
"""

import asyncio
import time

_LOOK_EVERY_S = 0.005
_REST_S = 0.1  # between two looks at a loop that has little to do
_BUSY = 0.25  # the share of the time since the last look that it used a processor
_WINDOW_S = 10.0


class LoopWatch:
    """The longest holds of the last ten to twenty seconds."""

    def __init__(self) -> None:
        self._now = (0.0, 0.0)
        self._before = (0.0, 0.0)
        self._every_s = _LOOK_EVERY_S

    def longest(self) -> tuple[float, float]:
        """Processor time, and lag by the clock."""
        return max(self._now[0], self._before[0]), max(self._now[1], self._before[1])

    async def run(self) -> None:
        """Watch for as long as the service lives; timers, since a task per look costs too much."""
        loop = asyncio.get_running_loop()
        self._window_s = self._last_s = time.monotonic()
        self._last_cpu_s = time.thread_time()
        self._timer = loop.call_later(self._every_s, self._look, loop)
        try:
            await loop.create_future()
        finally:
            self._timer.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s, cpu_s = time.monotonic(), time.thread_time()
        lag_s, used_s = now_s - self._last_s - self._every_s, cpu_s - self._last_cpu_s
        # Of a long pause only what the look itself waited for was surely done in one go.
        held_s = min(used_s, lag_s + _LOOK_EVERY_S)
        self._now = (max(self._now[0], held_s), max(self._now[1], lag_s))
        busy = used_s > _BUSY * (now_s - self._last_s)
        self._every_s = _LOOK_EVERY_S if busy else min(2 * self._every_s, _REST_S)
        self._last_s, self._last_cpu_s = now_s, cpu_s
        if now_s - self._window_s > _WINDOW_S:
            self._before, self._now, self._window_s = self._now, (0.0, 0.0), now_s
        self._timer = loop.call_later(self._every_s, self._look, loop)
