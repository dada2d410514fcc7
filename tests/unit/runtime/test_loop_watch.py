"""The watch over the event loop: what held it is seen, and the watch ends with its task."""

import asyncio
import time

from slackwater.runtime.services.loop_watch import LoopWatch

HELD_S = 0.05
SEEN_WITHIN_S = 60.0


def hold(seconds: float) -> None:
    """Nobody else has the loop meanwhile."""
    time.sleep(seconds)


def test_a_loop_that_was_held_is_seen_and_a_watch_that_ended_sees_nothing_more() -> None:
    async def scenario() -> None:
        watch = LoopWatch()
        task = asyncio.ensure_future(watch.run())
        await asyncio.sleep(0)  # it has begun
        hold(HELD_S)
        async with asyncio.timeout(SEEN_WITHIN_S):
            while watch.longest()[1] < HELD_S * 0.8:  # noqa: ASYNC110  (nobody says when it looks)
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        seen = watch.longest()
        hold(3 * max(HELD_S, seen[1]))
        await asyncio.sleep(0.02)
        assert watch.longest() == seen

    asyncio.run(scenario())
