"""Many small things on the event loop: in order, in slices, one of a tenant's requests at a time."""

import asyncio
import time

from slackwater.model.ids import TenantId
from slackwater.runtime.services.loop_shares import LoopShares

LOUD = TenantId("loud")


def busy(seconds: float) -> None:
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


def test_everything_is_done_in_order() -> None:
    done: list[int] = []
    asyncio.run(LoopShares(2).each(LOUD, range(1000), done.append))
    assert done == list(range(1000))


def test_others_go_between_however_many_requests_the_loud_tenant_has() -> None:
    """Counted, not timed: how many of the loud tenant's slices run between two turns of another's task."""

    async def scenario() -> int:
        shares, slices, most = LoopShares(2, slice_s=0.0), [0], 0
        loud = [
            asyncio.create_task(shares.each(LOUD, range(40), lambda _: slices.append(1)))
            for _ in range(20)
        ]
        while not all(task.done() for task in loud):
            before = len(slices)
            await asyncio.sleep(0)
            most = max(most, len(slices) - before)
        return most

    assert asyncio.run(scenario()) <= 2


def test_the_tenant_rests_between_its_slices() -> None:
    """In a share of the loop's time: the sum of the slices is at most half of what it took, however slow the machine."""

    async def scenario() -> float:
        shares, worked = LoopShares(2, slice_s=0.0), [0.0]

        def work(_: int) -> None:
            began_s = time.perf_counter()
            busy(0.002)
            worked[0] += time.perf_counter() - began_s

        began_s = time.perf_counter()
        await shares.each(LOUD, range(20), work)
        return worked[0] / (time.perf_counter() - began_s)

    assert asyncio.run(scenario()) < 0.5


def test_a_piece_of_work_that_fails_ends_the_rest_and_frees_the_turn() -> None:
    async def scenario() -> list[int]:
        shares, done = LoopShares(2), list[int]()

        def work(item: int) -> None:
            if item == 2:
                raise ValueError("two")
            done.append(item)

        try:
            await shares.each(LOUD, range(5), work)
        except ValueError:
            await shares.each(LOUD, [7], work)
        return done

    assert asyncio.run(scenario()) == [0, 1, 7]
