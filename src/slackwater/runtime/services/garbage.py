"""Python's cyclic garbage collection stops the event loop, for 0.1 s and more with many turns.

So the service's own objects are left out, young objects are collected a few thousand at a time
(some milliseconds), and all of them when nothing is under way, or after five minutes. What that
frees goes back to the system.
"""

import asyncio
import gc
import time
from collections.abc import Callable

from slackwater.wire.memory import trim_heap

_YOUNG = (1_000, 4)
_NEVER = 1_000_000_000
_LOOK_EVERY_S = 10.0
_IDLE_S, _LATEST_S = 60.0, 300.0


async def collect_when_idle(idle: Callable[[], bool]) -> None:
    """For as long as the service lives, from when it has been built up."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(*_YOUNG, _NEVER)
    last_s = time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        since_s = time.monotonic() - last_s
        if since_s > _LATEST_S or (since_s > _IDLE_S and idle()):
            gc.collect()
            trim_heap()
            last_s = time.monotonic()
