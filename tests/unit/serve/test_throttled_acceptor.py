"""Many that connect at once come in a few at a time, and all of them do."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

from slackwater.serve.http.throttled_acceptor import LoopThrottle, ThrottledAcceptor

MANY = 200


class Guest(asyncio.Protocol):
    """Says hello when it has come in."""

    entered = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        Guest.entered += 1
        transport.write(b"hello")
        transport.close()


@contextmanager
def crowd(count: int) -> Iterator[tuple[socket.socket, list[socket.socket]]]:
    """A listening socket with so many that wait before it."""
    Guest.entered = 0
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(2 * MANY)
        clients = [
            stack.enter_context(socket.create_connection(listening.getsockname(), 60))
            for _ in range(count)
        ]
        yield listening, clients


def test_a_crowd_comes_in_a_few_in_every_round_of_the_loop() -> None:
    async def rounds(listening: socket.socket) -> list[int]:
        acceptor, entered = ThrottledAcceptor(listening, Guest), [0]
        async with asyncio.timeout(60):
            while entered[-1] < MANY:
                await asyncio.sleep(0)
                entered.append(Guest.entered)
        acceptor.close()
        return entered

    with crowd(MANY) as (listening, clients):
        entered = asyncio.run(rounds(listening))
        assert max(now - before for before, now in pairwise(entered)) <= 20
        assert all(client.recv(5) == b"hello" for client in clients)


def test_a_closed_acceptor_accepts_nobody() -> None:
    async def rounds(listening: socket.socket) -> None:
        ThrottledAcceptor(listening, Guest).close()
        for _ in range(100):
            await asyncio.sleep(0)

    with crowd(3) as (listening, _):
        asyncio.run(rounds(listening))
        assert Guest.entered == 0


def test_what_many_say_first_is_heard_in_order_and_a_few_in_every_round() -> None:
    async def heard_by_round() -> tuple[list[int], list[int]]:
        line, heard, by_round = LoopThrottle(3), list[int](), [0]
        for number in range(MANY):
            line.put(lambda number=number: heard.append(number))  # type: ignore[misc]
        async with asyncio.timeout(60):
            while len(heard) < MANY:
                await asyncio.sleep(0)
                by_round.append(len(heard))
        line.put(lambda: heard.append(MANY))
        await asyncio.sleep(0)
        return heard, by_round

    heard, by_round = asyncio.run(heard_by_round())
    assert heard == list(range(MANY + 1))
    assert max(now - before for before, now in pairwise(by_round)) <= 3
