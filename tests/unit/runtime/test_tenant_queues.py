"""Tenants' work on the event loop: in order for each, in turn for all, a little in a round."""

import asyncio
import time
from collections.abc import Iterator

from slackwater.model.ids import TenantId
from slackwater.runtime.services.loop_shares import LoopShares, TenantQueues

LOUD, QUIET = TenantId("loud"), TenantId("quiet")


async def until(done: list[str], count: int) -> None:
    async with asyncio.timeout(60):
        while len(done) < count:  # noqa: ASYNC110  (the loop itself is what is tested)
            await asyncio.sleep(0)


def test_a_tenant_with_much_lets_another_go_between() -> None:
    done: list[str] = []

    async def scenario() -> None:
        queues = TenantQueues(LoopShares(1))
        queues.each(LOUD, range(1000), lambda number: done.append(f"loud {number}"))
        queues.each(QUIET, range(3), lambda number: done.append(f"quiet {number}"))
        await until(done, 1003)

    asyncio.run(scenario())
    assert [name for name in done if name.startswith("quiet")] == ["quiet 0", "quiet 1", "quiet 2"]
    assert done.index("quiet 2") < 7
    assert [name for name in done if name.startswith("loud")] == [f"loud {n}" for n in range(1000)]


def test_what_a_tenant_brings_later_waits_for_what_it_brought_before() -> None:
    done: list[str] = []

    def steps(name: str) -> Iterator[None]:
        for number in range(3):
            done.append(f"{name}{number}")
            yield

    async def scenario() -> None:
        queues = TenantQueues(LoopShares(1))
        queues.put(LOUD, steps("a"))
        queues.put(LOUD, steps("b"))
        await until(done, 6)

    asyncio.run(scenario())
    assert done == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_a_round_of_the_loop_takes_a_slice_and_no_more() -> None:
    done: list[str] = []
    rounds = 0

    async def scenario() -> None:
        nonlocal rounds
        queues = TenantQueues(LoopShares(1), slice_s=0.0)
        queues.each(LOUD, range(50), lambda number: done.append(str(number)))
        async with asyncio.timeout(60):
            while len(done) < 50:
                await asyncio.sleep(0)
                rounds += 1

    asyncio.run(scenario())
    assert rounds >= 50


def test_a_step_that_raises_ends_its_own_steps_alone() -> None:
    done: list[str] = []

    def broken() -> Iterator[None]:
        yield
        raise ValueError("broken")

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        queues = TenantQueues(LoopShares(1))
        queues.put(LOUD, broken())
        queues.each(LOUD, range(2), lambda number: done.append(f"loud {number}"))
        queues.each(QUIET, range(2), lambda number: done.append(f"quiet {number}"))
        await until(done, 4)

    asyncio.run(scenario())
    assert sorted(done) == ["loud 0", "loud 1", "quiet 0", "quiet 1"]


def test_a_queue_beyond_its_tenants_share_waits_while_others_are_active() -> None:
    """A step of the quiet tenant is taken meanwhile, and once it is away the queue goes on."""
    done: list[str] = []
    now_s = 0.0

    async def scenario() -> None:
        nonlocal now_s
        shares = LoopShares(2, clock=lambda: now_s)
        queues = TenantQueues(shares)
        queues.each(QUIET, range(1), lambda number: done.append("quiet"))
        await until(done, 1)
        queues.each(LOUD, range(2), lambda number: done.append(f"loud {number}"))
        await until(done, 2)
        shares.charge(LOUD, 0.02)
        queues.each(LOUD, range(2, 4), lambda number: done.append(f"loud {number}"))
        for _ in range(100):
            await asyncio.sleep(0)
        queues.each(QUIET, range(1), lambda number: done.append("quiet"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert done[-1] == "quiet", "not when the other's rest is over"
        assert "loud 3" not in done
        now_s += 10  # the debt is paid by then, and the quiet tenant has gone
        await until(done, 6)

    asyncio.run(scenario())
    assert [name for name in done if name != "quiet"] == [f"loud {number}" for number in range(4)]


def test_the_time_of_steps_is_their_tenants() -> None:
    async def scenario() -> None:
        shares = LoopShares(2)
        queues, done = TenantQueues(shares), list[str]()

        def work(_: int) -> None:
            until_s = time.thread_time() + 0.002
            while time.thread_time() < until_s:
                pass
            done.append("step")

        queues.each(LOUD, range(3), work)
        await until(done, 3)
        await asyncio.sleep(0)
        assert shares.totals[LOUD] >= 0.012, "as long again for what ends them"
        assert shares.totals[QUIET] == 0

    asyncio.run(scenario())
