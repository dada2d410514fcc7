"""Who has had more of the event loop than its share waits, one request at a time."""

import asyncio
import time

import pytest

from slackwater.model.ids import TenantId
from slackwater.runtime.services.loop_shares import LoopShares

LOUD, QUIET = TenantId("loud"), TenantId("quiet")


class Clock:
    """Stands still but for what is worked."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def shared(clock: Clock) -> LoopShares:
    """Where another tenant is about, too, however long this takes."""
    shares = LoopShares(2, 1e9, clock, clock)
    shares.record_request(QUIET)
    return shares


async def waits(shares: LoopShares, tenant: TenantId) -> bool:
    """For longer than a round of the loop."""
    turn = asyncio.create_task(shares.wait_turn(tenant))
    for _ in range(5):
        await asyncio.sleep(0)
    return not turn.done() and turn.cancel()


async def work_of(clock: Clock, seconds: float, steps: int) -> str:
    for _ in range(steps):
        clock.now_s += seconds
        await asyncio.sleep(0)
    return "done"


def test_every_step_of_a_request_is_counted_and_who_had_too_much_waits() -> None:
    async def scenario() -> None:
        clock = Clock()
        shares = shared(clock)
        assert not await waits(shares, LOUD)
        assert await shares.meter(LOUD, work_of(clock, 0.004, 5)) == "done"
        assert await waits(shares, LOUD), "20 ms of work, of which 8 are its share"
        assert not await waits(shares, QUIET)
        clock.now_s += 0.1
        assert not await waits(shares, LOUD), "by now its share is as much"

    asyncio.run(scenario())


def test_a_tenant_without_others_about_never_waits() -> None:
    async def scenario() -> None:
        clock = Clock()
        shares = LoopShares(2, clock=clock, cpu_clock=clock)
        await shares.meter(LOUD, work_of(clock, 1.0, 3))
        assert not await waits(shares, LOUD)
        shares.record_request(QUIET)
        assert await waits(shares, LOUD)
        clock.now_s += 10
        assert not await waits(shares, LOUD)

    asyncio.run(scenario())


def test_a_step_that_garbage_was_collected_in_is_charged_as_a_long_one() -> None:
    """Whose step it is has nothing to do with whose garbage that was."""

    async def scenario() -> None:
        clock = Clock()
        shares = shared(clock)
        await shares.meter(LOUD, work_of(clock, 1.0, 1))
        assert shares.totals[LOUD] < 0.01
        assert 0 < shares.delay_s(LOUD) < 0.025

    asyncio.run(scenario())


def test_a_rest_is_long_enough_for_a_timer_however_small_the_debt() -> None:
    """A loop that counts milliseconds would ask again and again until a shorter one is over."""
    clock = Clock()
    shares = shared(clock)
    shares.charge(LOUD, 0.00101)
    assert 0.001 < shares.delay_s(LOUD) < 0.005
    clock.now_s += shares.delay_s(LOUD)
    assert shares.delay_s(LOUD) == 0


def test_requests_that_wait_go_on_one_at_a_time() -> None:
    """Each has used up the tenant's share for a while, so that the next is not let through
    with it.
    """

    async def scenario() -> list[int]:
        extra, order = [0.0], list[int]()
        shares = LoopShares(2, active_s=1e9, clock=lambda: time.perf_counter() + extra[0])
        shares.record_request(QUIET)

        async def request(number: int) -> None:
            await shares.wait_turn(LOUD)
            order.append(number)
            extra[0] += 0.01
            shares.charge(LOUD, 0.01)

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
            await shares.meter(LOUD, fails())
        cleaned: list[str] = []

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append("up")

        task = asyncio.create_task(shares.meter(LOUD, waits()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cleaned == ["up"]

    asyncio.run(scenario())


def test_a_burst_of_requests_of_a_tenant_that_is_alone_leaves_the_loop_to_others_that_come() -> (
    None
):
    begun, most = 0, 0

    async def scenario() -> None:
        nonlocal most
        clock = Clock()
        shares = LoopShares(2, clock=clock, cpu_clock=clock)

        async def request() -> None:
            nonlocal begun
            await shares.wait_turn(LOUD)
            begun += 1
            shares.charge(LOUD, 0.001)

        asked = [asyncio.create_task(request()) for _ in range(64)]
        async with asyncio.timeout(60):
            while begun < 64:
                before = begun
                await asyncio.sleep(0)
                most = max(most, begun - before)
            await asyncio.gather(*asked)

    asyncio.run(scenario())
    assert most <= 4
