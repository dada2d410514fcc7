"""Calls of a service over connections that are kept, against real sockets that behave and
misbehave.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from slackwater.model.errors import ConfigError
from slackwater.rl.actions import CallError, ServiceCalls, ServiceReply

WITHIN_S = 30.0

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """The first line and the body of the next request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
    return head.partition("\r\n")[0], await reader.readexactly(length)


def said(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def with_service(
    talk: Talk, work: Callable[[ServiceCalls], Awaitable[None]], silent_s: float = WITHIN_S
) -> int:
    """Run `work` against a service that talks so; how many connections it was given."""
    connections = 0

    async def scenario() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            try:
                await talk(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/under"
        calls = ServiceCalls(url, "key", silent_s=silent_s, max_connections=8)
        try:
            await asyncio.wait_for(work(calls), WITHIN_S)
        finally:
            calls.close()
            server.close()

    asyncio.run(scenario())
    return connections


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        line, body = await request(reader)
        if line.startswith("GET"):
            body = f'"{line}"'.encode()
        for piece in (said(body)[:20], said(body)[20:]):  # an answer may come in pieces
            writer.write(piece)
            await writer.drain()


def test_calls_after_each_other_have_one_connection_and_calls_at_once_have_several() -> None:
    async def work(calls: ServiceCalls) -> None:
        for number in range(5):
            assert await calls.ask("POST", "/x", {"a": number}) == ServiceReply(200, {"a": number})
        assert await calls.ask("GET", "/é x?b=1") == ServiceReply(
            200, "GET /under/%C3%A9%20x?b=1 HTTP/1.1"
        )

    assert with_service(echo, work) == 1

    async def at_once(calls: ServiceCalls) -> None:
        answers = await asyncio.gather(*(calls.ask("POST", "/x", n) for n in range(20)))
        assert [answer.content for answer in answers] == list(range(20))

    assert 2 <= with_service(echo, at_once) <= 8


def test_what_is_not_json_is_text_and_chunks_are_put_together() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(said(b"busy", "503 Service Unavailable"))
        await request(reader)
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"3\r\n[1,\r\n2\r\n2]\r\n0\r\n\r\n")
        await request(reader)

    async def work(calls: ServiceCalls) -> None:
        assert await calls.ask("GET", "/") == ServiceReply(503, "busy")
        assert await calls.ask("GET", "/") == ServiceReply(200, [1, 2])

    assert with_service(talk, work) == 1


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[1", b"junk\r\n"]
)
def test_a_call_whose_answer_breaks_off_is_told_so_and_the_next_one_goes_through(
    answer: bytes,
) -> None:
    broken = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal broken
        if broken:
            await echo(reader, writer)
        broken += 1
        await request(reader)
        writer.write(answer)
        await writer.drain()

    async def work(calls: ServiceCalls) -> None:
        with pytest.raises(CallError):
            await calls.ask("POST", "/", 1)
        assert await calls.ask("POST", "/", 2) == ServiceReply(200, 2)

    assert with_service(talk, work) == 2


def test_a_connection_that_its_service_ends_with_an_answer_is_not_used_again() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, body = await request(reader)
        writer.write(said(body, more="Connection: close\r\n"))
        await writer.drain()

    async def work(calls: ServiceCalls) -> None:
        assert [(await calls.ask("POST", "/", n)).content for n in range(3)] == [0, 1, 2]

    assert with_service(talk, work) == 3


def test_the_answer_of_a_call_that_was_cancelled_is_nobody_elses() -> None:
    heard = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not heard.is_set():
            await request(reader)
            heard.set()
            await reader.read()  # until the caller hangs up
            return
        await echo(reader, writer)

    async def work(calls: ServiceCalls) -> None:
        asked = asyncio.create_task(calls.ask("POST", "/", "first"))
        await heard.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert await calls.ask("POST", "/", "second") == ServiceReply(200, "second")

    assert with_service(talk, work) == 2


def test_a_service_that_says_nothing_is_given_up() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def work(calls: ServiceCalls) -> None:
        with pytest.raises(CallError, match="the service sent nothing"):
            await calls.ask("POST", "/", {})

    with_service(talk, work, silent_s=0.05)


def test_nobody_there_and_a_wrong_address_are_told() -> None:
    async def nobody() -> None:
        calls = ServiceCalls("http://127.0.0.1:1", "key", silent_s=1, max_connections=1)
        with pytest.raises(CallError, match="no connection"):
            await calls.ask("GET", "/")

    asyncio.run(nobody())
    with pytest.raises(ConfigError, match="url"):
        ServiceCalls("127.0.0.1:8123", "key", silent_s=1, max_connections=1)
    with pytest.raises(ConfigError, match="key"):
        ServiceCalls("http://127.0.0.1", "k\r\nHost: x", silent_s=1, max_connections=1)
