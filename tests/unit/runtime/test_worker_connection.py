"""What a worker says is passed on in order and in pieces, all of it before its end."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
import uvloop
from hub_peer import dial

from harness.one_key import OneKey
from slackwater.model.ids import WorkerId
from slackwater.runtime.net.hub import WorkerHub
from slackwater.wire import messages
from slackwater.wire.frames import Frame, FrameError

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


class Listener:
    """Counts frames by call; the frame numbered `bad` is refused. `then` is called each time."""

    def __init__(self, bad: int = 0, then: Callable[[], None] = lambda: None) -> None:
        self._then = then
        self.pieces: list[int] = []
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._bad = bad

    def worker_joined(self, hello: messages.Hello) -> None:
        """Nothing to keep."""

    def handle_frames(self, worker: WorkerId, frames: Sequence[Frame]) -> None:
        assert not self.lost.done(), "it spoke after its end"
        self.pieces.append(len(frames))
        self._then()
        if 0 < self._bad <= sum(self.pieces):
            raise FrameError("not a message")

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        self.lost.set_result(reason)


def heard(new_loop: Callable[[], asyncio.AbstractEventLoop], sent: bytes, bad: int = 0) -> Listener:
    """Of a worker that sends this and leaves."""

    async def scenario() -> Listener:
        listener, hub = Listener(bad), WorkerHub(OneKey("s"))
        await hub.start(listener)
        _, writer, _ = await dial(hub, messages.Hello("w", "trainer"), "s")
        writer.write(sent)
        writer.close()
        async with asyncio.timeout(60):
            await listener.lost
        await hub.close()
        return listener

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(scenario())


@LOOPS
def test_many_frames_are_passed_on_in_pieces_and_the_end_comes_last(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    listener = heard(new_loop, 2000 * messages.encode(messages.Heartbeat({"running": 1.0})))
    assert sum(listener.pieces) == 2000
    assert max(listener.pieces) <= 16
    assert listener.lost.result() == "it closed the connection"


@LOOPS
def test_a_frame_that_is_cut_off_or_refused_is_the_reason(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    beat = messages.encode(messages.Heartbeat())
    assert "bytes into a frame" in heard(new_loop, 20 * beat + beat[:-1]).lost.result()
    refused = heard(new_loop, 40 * beat, bad=20)
    assert refused.lost.result() == "not a message"
    assert sum(refused.pieces) == 32


@LOOPS
def test_what_came_before_the_hub_hung_up_is_passed_on_before_the_end(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def scenario() -> None:
        hub = WorkerHub(OneKey("s"))
        listener = Listener(then=lambda: hub.hang_up(WorkerId("w")))
        await hub.start(listener)
        _, writer, _ = await dial(hub, messages.Hello("w", "trainer"), "s")
        writer.write(40 * messages.encode(messages.Heartbeat()))
        async with asyncio.timeout(60):
            await listener.lost
        assert sum(listener.pieces) == 40
        writer.close()
        await hub.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
