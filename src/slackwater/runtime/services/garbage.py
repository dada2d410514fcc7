"""Keeps Python's garbage collector from stopping the event loop, for 0.1 s and more with many
turns.

Objects that exist after the start are frozen. Young objects are collected a few thousand at a time,
which takes some milliseconds. A full collection runs when the service is idle, or after five
minutes, and returns freed memory to the system.
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


def collect_young_only() -> None:
    """From now on collections take some milliseconds; call it when all parts are built."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(*_YOUNG, _NEVER)


async def collect_when_idle(idle: Callable[[], bool]) -> None:
    """Run until the service ends; start it when all parts are built."""
    collect_young_only()
    last_s = time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        since_s = time.monotonic() - last_s
        if since_s > _LATEST_S or (since_s > _IDLE_S and idle()):
            gc.collect()
            trim_heap()
            last_s = time.monotonic()
