"""Python's search for garbage in cycles stops the event loop: a whole one for a tenth of a second
and more once many turns are under way.

What the service is made of is left out of it, young objects are looked through a few thousand at a
time, which takes some milliseconds (a hundred thousand took 75), and the whole is looked through
when nothing is under way, or at the latest after ten minutes.
"""

import asyncio
import gc
import time
from collections.abc import Callable

_YOUNG = (1_000, 4)
_NEVER = 1_000_000_000
_LOOK_EVERY_S = 10.0
_IDLE_S, _LATEST_S = 60.0, 600.0


async def collect_when_idle(idle: Callable[[], bool]) -> None:
    """For as long as the service lives, from when it has been built up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_YOUNG, _NEVER)
    last_s = time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        since_s = time.monotonic() - last_s
        if since_s > _LATEST_S or (since_s > _IDLE_S and idle()):
            gc.collect()
            last_s = time.monotonic()
