"""Providers over real (tiny) processes: they come, are noticed, leave, are killed, and fail to
start.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence

import pytest

from harness.local_processes import LocalProcesses
from slackwater.control.operations.restarts import RestartPolicy
from slackwater.model.ids import InstanceId
from slackwater.model.spot_trace import spot_events
from slackwater.runtime.launch.children import Children
from slackwater.runtime.launch.port import (
    InstanceEnded,
    InstanceNoticed,
    ProviderEvent,
    StartFailed,
)
from slackwater.runtime.services.instances import replay_trace

LEAVES_ON_TERM = ("sleep", "60")
STUBBORN = ("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")


class Told:
    """Keeps what a provider said, and waits for a word with a deadline."""

    def __init__(self) -> None:
        self.events: list[ProviderEvent] = []
        self._more = asyncio.Event()

    def __call__(self, event: ProviderEvent) -> None:
        self.events.append(event)
        self._more.set()

    async def until(self, done: Callable[["Told"], bool], within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not done(self):
                self._more.clear()
                await self._more.wait()

    def of(self, kind: type) -> list[ProviderEvent]:
        return [event for event in self.events if isinstance(event, kind)]


def children(told: Told, *command: str, leave_grace_s: float = 0.2, attempts: int = 3) -> Children:
    async def spawn(instance: InstanceId) -> asyncio.subprocess.Process:
        del instance
        return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)

    return Children(
        spawn,
        told,
        policy=RestartPolicy(first_s=0.01, longest_s=0.02),
        attempts=attempts,
        starts_within_s=60.0,  # a busy machine takes long to start what ends at once
        leave_grace_s=leave_grace_s,
    )


async def until_up(family: Children, names: Sequence[InstanceId]) -> None:
    while True:
        if all(family.pid(name) for name in names):
            return
        await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(bounded())


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_started_instances_have_their_own_processes_and_leave_when_released() -> None:
    async def body() -> None:
        told = Told()
        family = children(told, *LEAVES_ON_TERM)
        provider = LocalProcesses(family, "spot")
        names = provider.start(2)
        assert names == ("spot-1", "spot-2")
        await until_up(family, names)
        pids = {family.pid(name) for name in names}
        assert len(pids) == 2
        provider.release(names[0])
        await told.until(lambda t: bool(t.of(InstanceEnded)))
        assert told.of(InstanceEnded) == [InstanceEnded(names[0], "it was released")]
        assert provider.instances() == (names[1],)
        await provider.close()
        assert all(pid is not None and gone(pid) for pid in pids)

    run(body)


def test_a_kill_ends_a_process_that_ignores_requests_and_so_does_the_end_of_its_grace() -> None:
    async def body() -> None:
        told = Told()
        family = children(told, *STUBBORN)
        provider = LocalProcesses(family, "x")
        first, second, third = provider.start(3)
        await until_up(family, (first, second, third))
        provider.kill(first)
        provider.notice(second, 0.05)
        provider.release(third)
        await told.until(lambda t: len(t.of(InstanceEnded)) == 3)
        assert InstanceNoticed(second, 0.05) in told.events
        said = {event.instance: event.reason for event in told.of(InstanceEnded)}  # type: ignore[union-attr]
        assert said == {
            first: "it was killed",
            second: "its notice ran out",
            third: "it was released",
        }

    run(body)


def test_a_noticed_instance_stays_until_its_grace_ends_and_may_be_released_before() -> None:
    async def body() -> None:
        told = Told()
        family = children(told, *LEAVES_ON_TERM)
        provider = LocalProcesses(family, "x")
        (name,) = provider.start(1)
        await until_up(family, (name,))
        provider.notice(name, 30.0)
        provider.notice(name, 0.0)  # a second notice does not shorten the first
        assert len(told.of(InstanceNoticed)) == 1
        assert provider.instances() == (name,)
        provider.release(name)
        await told.until(lambda t: bool(t.of(InstanceEnded)))

    run(body)


@pytest.mark.parametrize(
    "command", [("/no/such/engine",), (sys.executable, "-c", "raise SystemExit(7)")]
)
def test_a_start_that_fails_is_reported_backed_off_and_given_up(command: tuple[str, ...]) -> None:
    async def body() -> None:
        told = Told()
        provider = LocalProcesses(children(told, *command), "x")
        (name,) = provider.start(1)
        await told.until(lambda t: bool(t.of(InstanceEnded)))
        retries = [event.retry_in_s for event in told.of(StartFailed)]  # type: ignore[union-attr]
        assert retries == [0.01, 0.02, None]
        assert "did not start in 3 attempts" in str(told.events[-1])
        assert provider.instances() == ()
        assert provider.start(1) == (InstanceId("x-2"),)  # the provider itself lives on
        provider.kill(InstanceId("x-2"))
        await provider.close()
        assert name == "x-1"

    run(body)


@pytest.mark.parametrize("notice_s", [0.0, 0.05])
def test_a_spot_trace_is_replayed_in_scaled_time(notice_s: float) -> None:
    async def body() -> None:
        told = Told()
        provider = children(told, *LEAVES_ON_TERM)
        trace = spot_events(["t_s,event,instance_id", "0,add,i1", "10,add,i2", "40,remove,i1"])
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await replay_trace(trace, provider, speed=100.0, notice_s=notice_s)
        assert loop.time() - began_s >= 0.4
        await told.until(lambda t: bool(t.of(InstanceEnded)))
        assert bool(told.of(InstanceNoticed)) == (notice_s > 0)
        assert provider.names() == (InstanceId("i2"),)
        await provider.close()

    run(body)
