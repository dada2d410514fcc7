"""A worker's connection with a grace period: it dials again, and what was asked before is over."""

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from harness.one_key import OneKey
from slackwater.model.ids import WorkerId
from slackwater.runtime.net.hub import WorkerHub
from slackwater.wire import messages
from slackwater.wire.frames import Frame
from slackwater.worker.connection import Connection, DisconnectedError

DEADLINE_S = 120.0
HELLO = messages.Hello("w", "trainer")


class Plane:
    """A control plane at one port, that hears of versions."""

    def __init__(self, folder: Path) -> None:
        self.joined = asyncio.Event()
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self.hub = WorkerHub(OneKey("s"), heartbeat_every_s=0.05, port_file=folder / "port")

    def worker_joined(self, hello: messages.Hello) -> None:
        self.joined.set()

    def handle_frames(self, worker: WorkerId, frames: Sequence[Frame]) -> None:
        for frame in frames:
            message = messages.decode_from_worker(frame.body)
            if isinstance(message, messages.VersionReady):
                self.heard.put_nowait(message.version)

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        """Nothing to keep."""

    async def die(self) -> None:
        """Without a word."""
        self.hub._writers.clear()
        await self.hub.close()


def test_a_worker_returns_to_the_next_control_plane_and_answers_nothing_that_the_last_one_asked(
    tmp_path: Path,
) -> None:
    returns: list[str] = []
    asked = threading.Event()

    def work(connection: Connection) -> None:
        def returned() -> None:
            returns.append("returned")
            connection.send(messages.encode(messages.VersionReady("held")))

        connection.on_adopted = returned
        for _ in range(2):
            while not (came := connection.receive(None)):
                pass
            (order,) = came
            assert isinstance(order, messages.PullVersion)
            returns.append(order.version)
            asked.set()
            while order.version == "first" and not connection.lost:
                connection.receive(0.01)
            # Dropped, if the control plane that asked is gone, also if there is another by now.
            connection.send(messages.encode(messages.VersionReady(order.version)))

    async def scenario() -> None:
        first = Plane(tmp_path)
        await first.hub.start(first)
        made = partial(Connection, first.hub.address, HELLO, "s", grace_s=DEADLINE_S)
        with await asyncio.to_thread(made) as connection:
            working = asyncio.create_task(asyncio.to_thread(work, connection))
            await first.joined.wait()
            first.hub.send(WorkerId("w"), messages.PullVersion("first"))
            await asyncio.to_thread(asked.wait, DEADLINE_S)
            await first.die()
            second = Plane(tmp_path)
            await second.hub.start(second)
            assert second.hub.address == first.hub.address
            async with asyncio.timeout(DEADLINE_S):
                await second.joined.wait()
                assert await second.heard.get() == "held"
                second.hub.send(WorkerId("w"), messages.PullVersion("second"))
                assert await second.heard.get() == "second"
                await working
            await second.hub.close()
        assert returns == ["first", "returned", "second"]

    asyncio.run(scenario())


def test_a_worker_leaves_when_its_grace_period_is_over_or_it_may_not_be_adopted(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        for grace_s, writes in ((0.3, False), (3600.0, True)):
            plane, orphaned = Plane(tmp_path), threading.Event()
            await plane.hub.start(plane)
            made = partial(Connection, plane.hub.address, HELLO, "s", grace_s=grace_s)
            with await asyncio.to_thread(made, on_orphaned=orphaned.set) as connection:
                connection.may_outlive = lambda: not writes  # noqa: B023
                await plane.joined.wait()
                await plane.die()
                assert await asyncio.to_thread(orphaned.wait, DEADLINE_S)

    asyncio.run(scenario())


def test_without_a_grace_period_whoever_receives_or_sends_next_hears_of_the_loss(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        plane, orphaned = Plane(tmp_path), threading.Event()
        await plane.hub.start(plane)
        made = partial(Connection, plane.hub.address, HELLO, "s", on_orphaned=orphaned.set)
        with await asyncio.to_thread(made) as connection:
            await plane.joined.wait()
            await plane.die()
            assert await asyncio.to_thread(orphaned.wait, DEADLINE_S)  # by a heartbeat
            with pytest.raises(DisconnectedError):
                await asyncio.wait_for(asyncio.to_thread(connection.receive, None), DEADLINE_S)
            with pytest.raises(DisconnectedError):
                connection.send(messages.encode(messages.VersionReady("late")))

    asyncio.run(scenario())
