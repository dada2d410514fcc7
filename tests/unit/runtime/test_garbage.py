"""Looking for garbage never holds the event loop for long while much is under way."""

import asyncio
import gc
from typing import Any

from slackwater.runtime.services.garbage import collect_when_idle


def test_objects_that_stay_are_looked_through_a_few_thousand_at_a_time() -> None:
    looked_at: list[int] = []
    asyncio.run(_keep_many(looked_at))
    assert looked_at
    assert max(looked_at) < 10_000


async def _keep_many(looked_at: list[int]) -> None:
    """Many new objects beside the service's collector; how many each look went through."""

    def heard(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            young = range(info["generation"] + 1)
            looked_at.append(sum(len(gc.get_objects(generation)) for generation in young))

    before = gc.get_threshold()
    collecting = asyncio.create_task(collect_when_idle(lambda: False))
    try:
        await asyncio.sleep(0)
        gc.callbacks.append(heard)
        kept = [[number] for number in range(100_000)]
    finally:
        gc.callbacks.remove(heard)
        collecting.cancel()
        gc.set_threshold(*before)
        gc.unfreeze()
    assert len(kept) == 100_000
