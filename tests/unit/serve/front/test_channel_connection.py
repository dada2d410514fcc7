"""One end of a channel: a record that cannot be sent is its sender's alone."""

import asyncio
import socket

import pytest

from slackwater.serve.front.connection import ChannelConnection
from slackwater.wire import front
from slackwater.wire.frames import FrameDecoder, FrameError


def nothing(*_: object) -> None: ...


@pytest.mark.parametrize(
    "bad", [front.AskFuture(2, "mine", "\ud800", 0.0), front.AskFuture(1 << 70, "mine", "x", 0.0)]
)
def test_what_cannot_be_sent_takes_nothing_along(bad: front.Record) -> None:
    good = [front.AskFuture(1, "mine", "x", 0.0), front.AskFuture(3, "other", "y", 0.0)]

    async def sent() -> list[front.FromFront]:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        loop, decoder = asyncio.get_running_loop(), FrameDecoder()
        connection = ChannelConnection(nothing, nothing)
        await loop.create_connection(lambda: connection, sock=ours)
        connection.send(good[0])
        with pytest.raises(FrameError, match="AskFuture cannot be sent"):
            connection.send(bad)
        connection.send(good[1])
        found: list[front.FromFront] = []
        async with asyncio.timeout(60):
            while len(found) < len(good):
                for frame in decoder.feed(await loop.sock_recv(theirs, 1 << 16)):
                    found += front.decode_from_front(frame.body)
        connection.close()
        theirs.close()
        return found

    assert asyncio.run(sent()) == good
