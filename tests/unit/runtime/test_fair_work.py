"""Work off the event loop: every tenant gets its turn, and nobody gets all threads."""

import asyncio
import threading
import time

import pytest

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import TenantId
from slackwater.runtime.services.loop_shares import FairWork, LoopShares
from slackwater.runtime.services.tenants import TurnShares

LOUD, QUIET = TenantId("loud"), TenantId("quiet")


def test_a_tenant_with_nothing_under_way_starts_at_once_whatever_another_does() -> None:
    async def scenario() -> None:
        work, gate = FairWork(LoopShares(2), threads=2), threading.Event()
        held = [asyncio.create_task(work.run(LOUD, gate.wait, 60)) for _ in range(50)]
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            assert await work.run(QUIET, lambda: 7) == 7
        assert not any(task.done() for task in held)
        gate.set()
        await asyncio.gather(*held)
        work.close()

    asyncio.run(scenario())


def test_lines_are_served_in_turn() -> None:
    async def scenario() -> None:
        # One thread: with more, the machine would have a say in the order too.
        work, gate = FairWork(LoopShares(2), threads=1), threading.Event()
        done: list[str] = []
        blocker = asyncio.create_task(work.run(LOUD, gate.wait, 60))
        await asyncio.sleep(0)
        later = [asyncio.create_task(work.run(LOUD, done.append, "loud")) for _ in range(8)]
        later += [asyncio.create_task(work.run(QUIET, done.append, "quiet")) for _ in range(2)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(blocker, *later)
        assert done.count("loud") == 8
        assert max(place for place, name in enumerate(done) if name == "quiet") <= 3
        work.close()

    asyncio.run(scenario())


def test_errors_come_back_and_work_that_nobody_waits_for_is_not_begun() -> None:
    async def scenario() -> None:
        work, gate = FairWork(LoopShares(1), threads=1), threading.Event()
        ran: list[int] = []
        first = asyncio.create_task(work.run(LOUD, gate.wait, 60))
        given_up = asyncio.create_task(work.run(LOUD, ran.append, 1))
        await asyncio.sleep(0)
        given_up.cancel()
        gate.set()
        await first
        with pytest.raises(ZeroDivisionError):
            await work.run(LOUD, lambda: 1 // 0)
        assert ran == []
        work.close()

    asyncio.run(scenario())


def test_who_leaves_while_its_work_runs_has_its_thread_until_it_is_done() -> None:
    async def scenario() -> None:
        work, gate, ran = FairWork(LoopShares(2), threads=2), threading.Event(), threading.Event()
        began = threading.Event()

        def hold() -> None:
            began.set()
            gate.wait(60)

        held = asyncio.create_task(work.run(LOUD, hold))
        await asyncio.to_thread(began.wait, 30)
        held.cancel()
        later = asyncio.create_task(work.run(LOUD, ran.set))
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await work.run(QUIET, lambda: None)  # the other thread is free
            assert not ran.is_set()
            gate.set()
            await later
        work.close()

    asyncio.run(scenario())


def test_a_threads_time_is_its_tenants_and_the_next_work_waits_until_it_is_paid() -> None:
    def spin() -> None:
        until_s = time.thread_time() + 0.01
        while time.thread_time() < until_s:
            pass

    async def scenario() -> None:
        now_s = 0.0
        shares = LoopShares(2, active_s=1e9, clock=lambda: now_s)
        shares.record_request(QUIET)
        work = FairWork(shares, threads=2)
        async with asyncio.timeout(60):
            await work.run(LOUD, spin)
            while shares.totals[LOUD] < 0.01:  # noqa: ASYNC110  (told after the result)
                await asyncio.sleep(0)
            later = asyncio.create_task(work.run(LOUD, lambda: None))
            for _ in range(20):
                assert await work.run(QUIET, lambda: 7) == 7
            assert not later.done()
            now_s += 10
            await later
            assert shares.totals[QUIET] < 0.01
            given_up = asyncio.create_task(work.run(LOUD, spin))
            await given_up
            waiting = asyncio.create_task(work.run(LOUD, lambda: None))
            await asyncio.sleep(0)
            waiting.cancel()  # who leaves while it waits keeps no thread from the tenant
            now_s += 10
            assert await work.run(LOUD, lambda: 8) == 8
        work.close()

    asyncio.run(scenario())


def test_shares_of_turns_are_equal_and_too_many_in_one_request_are_refused_for_good() -> None:
    shares = TurnShares(8, ["loud", "quiet"])
    with pytest.raises(ConfigError, match="prompts x n: 5 must be at most 4"):
        shares.check(LOUD, 5, "prompts x n")
    shares.take(LOUD, 3)
    with pytest.raises(UnavailableError, match="3 samples of yours"):
        shares.check(LOUD, 2, "prompts x n")
    shares.check(QUIET, 4, "prompts x n")
    shares.give_back(LOUD, 3)
    shares.check(LOUD, 4, "prompts x n")
