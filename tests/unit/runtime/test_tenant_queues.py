"""Tenants' work on the event loop: in order for each, in turn for all, a little in a round."""

import asyncio
from collections.abc import Iterator

from slackwater.model.ids import TenantId
from slackwater.runtime.services.tenant_queues import TenantQueues

LOUD, QUIET = TenantId("loud"), TenantId("quiet")


async def until(done: list[str], count: int) -> None:
    async with asyncio.timeout(60):
        while len(done) < count:  # noqa: ASYNC110  (the loop itself is what is tested)
            await asyncio.sleep(0)


def test_a_tenant_with_much_lets_another_go_between() -> None:
    done: list[str] = []

    async def scenario() -> None:
        queues = TenantQueues()
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
        queues = TenantQueues()
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
        queues = TenantQueues(slice_s=0.0)
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
        queues = TenantQueues()
        queues.put(LOUD, broken())
        queues.each(LOUD, range(2), lambda number: done.append(f"loud {number}"))
        queues.each(QUIET, range(2), lambda number: done.append(f"quiet {number}"))
        await until(done, 4)

    asyncio.run(scenario())
    assert sorted(done) == ["loud 0", "loud 1", "quiet 0", "quiet 1"]
