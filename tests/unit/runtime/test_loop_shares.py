"""Many small things on the event loop: in order, in slices, one of a tenant's requests at a
time.
"""

import asyncio
import time

import pytest

from slackwater.model.ids import TenantId
from slackwater.runtime.services.loop_shares import LoopShares

LOUD, QUIET = TenantId("loud"), TenantId("quiet")


def busy(seconds: float) -> None:
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


class Clock:
    """Stands still but for what is worked."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def shared(slice_s: float = 0.0003, clock: Clock | None = None) -> LoopShares:
    """Where another tenant is about, too, however long this takes."""
    shares = LoopShares(2, slice_s, 1e9, clock or time.perf_counter)
    shares.seen(QUIET)
    return shares


def test_everything_is_done_in_order() -> None:
    done: list[int] = []
    asyncio.run(LoopShares(2).each(LOUD, range(1000), done.append))
    assert done == list(range(1000))


def test_others_go_between_however_many_requests_the_loud_tenant_has() -> None:
    """Counted, not timed: how many of the loud tenant's slices run between two turns of another's
    task.
    """

    async def scenario() -> int:
        shares, slices, most = shared(slice_s=0.0), [0], 0
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
    """In a share of the loop's time: the sum of the slices is at most half of what it took, however
    slow the machine.
    """

    async def scenario() -> float:
        shares, worked = shared(slice_s=0.0), [0.0]

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


async def work_of(clock: Clock, seconds: float, steps: int) -> str:
    for _ in range(steps):
        clock.now_s += seconds
        await asyncio.sleep(0)
    return "done"


def test_every_step_of_a_request_is_counted_and_who_had_too_much_waits() -> None:
    async def scenario() -> None:
        clock = Clock()
        shares = shared(clock=clock)
        assert not shares.waits(LOUD)
        assert await shares.metered(LOUD, work_of(clock, 0.004, 5)) == "done"
        assert shares.waits(LOUD), "20 ms of work, of which 8 are its share"
        assert not shares.waits(QUIET)
        clock.now_s += 0.1
        assert not shares.waits(LOUD), "by now its share is as much"

    asyncio.run(scenario())


def test_a_tenant_without_others_about_never_waits() -> None:
    async def scenario() -> None:
        clock = Clock()
        shares = LoopShares(2, clock=clock)
        await shares.metered(LOUD, work_of(clock, 1.0, 3))
        assert not shares.waits(LOUD)
        shares.seen(QUIET)
        assert shares.waits(LOUD)
        clock.now_s += 10
        assert not shares.waits(LOUD)

    asyncio.run(scenario())


def test_requests_that_wait_go_on_one_at_a_time() -> None:
    """Each has used up the tenant's share for a while, so that the next is not let through
    with it.
    """

    async def scenario() -> list[int]:
        extra, order = [0.0], list[int]()
        shares = LoopShares(2, about_s=1e9, clock=lambda: time.perf_counter() + extra[0])
        shares.seen(QUIET)

        async def request(number: int) -> None:
            await shares.turn(LOUD)
            order.append(number)
            extra[0] += 0.01
            shares.spent(LOUD, 0.01)

        loud = [asyncio.create_task(request(number)) for number in range(5)]
        await asyncio.sleep(0)
        begun_at_once = len(order)
        await asyncio.gather(*loud)
        assert order == [0, 1, 2, 3, 4]
        return [begun_at_once]

    assert asyncio.run(scenario()) == [1]


def test_what_is_metered_ends_and_is_cancelled_as_it_would_be_alone() -> None:
    async def scenario() -> None:
        shares = LoopShares(2)

        async def fails() -> None:
            await asyncio.sleep(0)
            raise ValueError("two")

        with pytest.raises(ValueError, match="two"):
            await shares.metered(LOUD, fails())
        cleaned: list[str] = []

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append("up")

        task = asyncio.create_task(shares.metered(LOUD, waits()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cleaned == ["up"]

    asyncio.run(scenario())


def test_it_is_crowded_while_several_are_about() -> None:
    clock = Clock()
    shares = LoopShares(2, clock=clock)
    clock.now_s = 10.0
    shares.seen(LOUD)
    assert not shares.crowded()
    shares.seen(QUIET)
    assert shares.crowded()
    clock.now_s = 13.0
    shares.seen(LOUD)
    assert not shares.crowded()


def test_a_burst_of_requests_of_a_tenant_that_is_alone_leaves_the_loop_to_others_that_come() -> (
    None
):
    begun, most = 0, 0

    async def scenario() -> None:
        nonlocal most
        clock = Clock()
        shares = LoopShares(2, clock=clock)

        async def request() -> None:
            nonlocal begun
            await shares.first_turn(LOUD)
            begun += 1
            shares.spent(LOUD, 0.001)

        asked = [asyncio.create_task(request()) for _ in range(64)]
        async with asyncio.timeout(60):
            while begun < 64:
                before = begun
                await asyncio.sleep(0)
                most = max(most, begun - before)
            await asyncio.gather(*asked)

    asyncio.run(scenario())
    assert most <= 4
