"""How long the event loop was held: the longest time between two looks at it, in processor time and by the clock.

Processor time says what the service's own code did in one go; what the clock says beyond that is waiting, for a processor or for Python's lock.
"""

import asyncio
import time

_LOOK_EVERY_S = 0.005
_WINDOW_S = 10.0


class LoopWatch:
    """The longest holds of the last ten to twenty seconds."""

    def __init__(self) -> None:
        self._now = (0.0, 0.0)
        self._before = (0.0, 0.0)

    def longest(self) -> tuple[float, float]:
        """Processor time, and lag by the clock."""
        return max(self._now[0], self._before[0]), max(self._now[1], self._before[1])

    async def run(self) -> None:
        """For as long as the service lives."""
        window_s = last_s = time.monotonic()
        last_cpu_s = time.thread_time()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now_s, cpu_s = time.monotonic(), time.thread_time()
            lag_s = now_s - last_s - _LOOK_EVERY_S
            self._now = (max(self._now[0], cpu_s - last_cpu_s), max(self._now[1], lag_s))
            last_s, last_cpu_s = now_s, cpu_s
            if now_s - window_s > _WINDOW_S:
                self._before, self._now, window_s = self._now, (0.0, 0.0), now_s
