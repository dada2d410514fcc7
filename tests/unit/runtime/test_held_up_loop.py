"""A control plane that was held up (a suspended machine, a long pause) must not take its workers
for dead.
"""

import asyncio
import time
from collections.abc import Sequence

from hub_peer import dial

from harness.one_key import OneKey
from slackwater.model.ids import WorkerId
from slackwater.runtime.live_driver import call_at
from slackwater.runtime.net.hub import WorkerHub
from slackwater.wire import messages
from slackwater.wire.frames import Frame


class Heard:
    """Keeps what the hub tells."""

    def __init__(self) -> None:
        self.frames = 0
        self.spoke = asyncio.Event()
        self.lost: list[str] = []
        self.lost_one = asyncio.Event()

    def worker_joined(self, hello: messages.Hello) -> None:
        """Nothing to keep."""

    def handle_frames(self, worker: WorkerId, frames: Sequence[Frame]) -> None:
        self.frames += len(frames)
        self.spoke.set()

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        self.lost.append(reason)
        self.lost_one.set()


async def connect(hub: WorkerHub) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer, _ = await dial(hub, messages.Hello("w", "trainer"), "s")
    return reader, writer


def test_what_came_while_the_loop_was_held_up_counts_before_the_clock_does() -> None:
    async def body() -> None:
        heard = Heard()
        hub = WorkerHub(OneKey("s"), silent_after_s=1.0)
        await hub.start(heard)
        _, writer = await connect(hub)
        writer.write(messages.encode(messages.Heartbeat()))
        await writer.drain()
        time.sleep(1.5)  # noqa: ASYNC251  (the loop is held up on purpose)
        async with asyncio.timeout(60):
            await heard.spoke.wait()
            assert heard.lost == []
            assert heard.frames == 1
            await heard.lost_one.wait()  # and real silence still ends it
        assert "nothing was heard" in heard.lost[0]
        writer.close()
        await hub.close()

    asyncio.run(body())


def test_a_worker_that_does_not_read_is_cut_off_before_it_fills_the_memory() -> None:
    async def body() -> None:
        heard = Heard()
        hub = WorkerHub(OneKey("s"), most_unread_bytes=1 << 20)
        await hub.start(heard)
        reader, writer = await connect(hub)
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # deaf from now on
        big = messages.RunPass(1, "m", bytes(1 << 19))
        async with asyncio.timeout(60):
            while not heard.lost:
                hub.send(WorkerId("w"), big)
                await asyncio.sleep(0)
        writer.close()
        await hub.close()

    asyncio.run(body())


def test_a_late_timer_lets_others_speak_first() -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        order: list[str] = []
        call_at(loop.time() + 0.01, lambda: order.append("lease"))
        loop.call_later(0.02, time.sleep, 1.2)
        loop.call_later(0.05, order.append, "said")
        time.sleep(1.2)  # noqa: ASYNC251
        async with asyncio.timeout(60):
            while "lease" not in order:  # noqa: ASYNC110  (it is nobody who could say so)
                await asyncio.sleep(0.01)
        assert order == ["said", "lease"]

    asyncio.run(body())


def test_what_a_worker_said_while_nobody_listened_is_passed_on_with_others_in_between() -> None:
    async def body() -> None:
        heard = Heard()
        hub = WorkerHub(OneKey("s"))
        await hub.start(heard)
        _, writer = await connect(hub)
        writer.write(messages.encode(messages.Heartbeat()) * 2000)
        await writer.drain()
        most = 0
        async with asyncio.timeout(60):
            while heard.frames < 2000:
                before = heard.frames
                await asyncio.sleep(0)
                most = max(most, heard.frames - before)
        assert most <= 64
        writer.close()
        await hub.close()

    asyncio.run(body())
