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


def test_what_held_a_loop_that_had_little_to_do_is_seen_in_processor_time_too() -> None:
    async def scenario() -> tuple[float, float]:
        watch = LoopWatch()
        task = asyncio.ensure_future(watch.run())
        await asyncio.sleep(0.3)  # looks become rare
        until_s = time.thread_time() + 0.4
        while time.thread_time() < until_s:
            pass
        await asyncio.sleep(0.2)
        task.cancel()
        return watch.longest()

    held_cpu_s, held_s = asyncio.run(scenario())
    assert held_cpu_s > 0.25 and held_s > 0.25  # all of it but for one pause between looks
