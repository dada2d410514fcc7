"""Bodies that are too large or too slow are answered with a clear error and a Content-Length."""

import asyncio
import json
import socket
import time
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from slackwater.model.ids import TenantId
from slackwater.runtime.services.loop_shares import LoopShares
from slackwater.serve.http.body_reader import find_text_error
from slackwater.serve.http.limits import PARSING, BodyLimits, ParsingTime
from slackwater.serve.http.server import HeadTimeoutProtocol


def call(
    messages: list[dict[str, Any]],
    headers: dict[bytes, bytes] | None = None,
    *,
    stall_s: float = 60.0,
    whole_s: float = 60.0,
) -> tuple[int, bytes]:
    """What the limits and an application that echoes answer; after `messages` the client is
    silent.
    """
    sent: list[dict[str, Any]] = []

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": message["body"]})

    async def receive() -> dict[str, Any]:
        if messages:
            await asyncio.sleep(0)
            return messages.pop()
        await asyncio.sleep(600)
        raise AssertionError("nobody waits so long")

    async def send(message: Any) -> None:
        sent.append(message)

    messages.reverse()
    scope = {"type": "http", "path": "/api/v1/x", "headers": list((headers or {}).items())}
    limits = BodyLimits(echo, max_bytes=10, stall_s=stall_s, whole_s=whole_s)
    asyncio.run(limits(scope, receive, send))
    if not sent:
        return 0, b""
    body = sent[1]["body"]
    if sent[0]["status"] != 200:
        assert dict(sent[0]["headers"])[b"content-length"] == str(len(body)).encode()
    return sent[0]["status"], body


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_within_the_limit_passes_whole() -> None:
    assert call([part(b"01234", True), part(b"56789")]) == (200, b"0123456789")


def test_a_body_above_the_limit_is_refused_before_or_while_it_comes() -> None:
    status, body = call([part(b"")], {b"content-length": b"11"})
    assert status == 413
    assert "at most 10 bytes" in json.loads(body)["error"]
    assert call([part(b"01234", True), part(b"567890", True)])[0] == 413


def test_a_body_that_stalls_is_given_up() -> None:
    status, body = call([part(b"0", True)], stall_s=0.05)
    assert status == 408
    assert "slowly" in json.loads(body)["error"]


def test_a_body_that_dribbles_for_too_long_is_given_up() -> None:
    assert call([part(b"", True) for _ in range(100_000)], whole_s=0.3)[0] == 408


def test_nothing_is_answered_to_a_client_that_left() -> None:
    assert call([part(b"0", True), {"type": "http.disconnect"}]) == (0, b"")


def test_json_has_a_limit_of_its_own_and_strangers_may_send_little() -> None:
    async def echo(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": message["body"]})

    def status(size: int, kind: bytes, key: bytes) -> int:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return part(b"x" * size)

        async def send(message: Any) -> None:
            sent.append(message)

        limits = BodyLimits(
            echo,
            max_bytes=1 << 20,
            max_json_bytes=100 << 10,
            stall_s=60,
            tenant_of=lambda headers: TenantId("me") if headers.get("x-api-key") == "k" else None,
        )
        headers = [(b"content-type", kind), (b"x-api-key", key)]
        scope = {"type": "http", "path": "/api/v1/x", "headers": headers}
        asyncio.run(limits(scope, receive, send))
        return int(sent[0]["status"])

    assert status(90 << 10, b"application/json; charset=utf-8", b"k") == 200
    assert status(101 << 10, b"application/json", b"k") == 413
    assert status(1 << 20, b"application/x-protobuf", b"k") == 200
    assert status(17 << 10, b"application/x-protobuf", b"?") == 413
    assert status(16 << 10, b"application/x-protobuf", b"?") == 200


def test_a_tenant_that_has_had_its_share_waits_and_others_go_between() -> None:
    order: list[str] = []
    extra = [0.0]

    async def parse(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        order.append(scope["name"])
        if scope["name"] == "loud":
            extra[0] += 0.01  # as if it had held the loop for so long

    async def nothing(message: Any) -> None: ...

    async def scenario() -> None:
        def clock() -> float:
            return time.perf_counter() + extra[0]

        shares = LoopShares(2, active_s=1e9, clock=clock, cpu_clock=clock)
        limits = BodyLimits(
            parse,
            max_bytes=1 << 20,
            stall_s=60,
            tenant_of=lambda headers: TenantId(headers["x-api-key"]),
            shares=shares,
        )

        async def request(name: str, size: int) -> None:
            async def receive() -> dict[str, Any]:
                return part(b"x" * size)

            headers = [(b"x-api-key", name.encode())]
            scope = {"type": "http", "path": "/v1/x", "headers": headers, "name": name}
            await limits(scope, receive, nothing)

        await request("quiet", 10)  # so that both are about
        loud = [asyncio.create_task(request("loud", 100 << 10)) for _ in range(20)]
        await asyncio.sleep(0)
        await request("quiet", 10)
        await asyncio.gather(*loud)

    asyncio.run(scenario())
    assert len(order) == 22
    assert order.index("quiet", 1) <= 3


def test_a_tenant_pays_for_its_connection_its_parsing_and_every_step_of_its_request() -> None:
    mine, parsing, at_s = TenantId("mine"), ParsingTime(0.002), [0.0]

    def clock() -> float:
        return at_s[0]

    async def step(scope: Any, receive: Any, send: Any) -> None:
        at_s[0] += 0.001
        await asyncio.sleep(0)
        at_s[0] += 0.003

    async def receive() -> dict[str, Any]:
        at_s[0] += 0.0005
        return part(b"x")

    async def send(message: Any) -> None: ...

    async def scenario() -> list[float]:
        shares, totals = LoopShares(2, active_s=1e9, clock=clock, cpu_clock=clock), list[float]()
        limits = BodyLimits(
            step, max_bytes=10, stall_s=60, tenant_of=lambda headers: mine, shares=shares
        )
        scope = {"type": "http", "path": "/v1/x", "headers": [], PARSING: parsing}
        for _ in range(2):
            await limits(scope, receive, send)
            totals.append(shares.totals[mine])
            parsing.seconds += 0.0001  # its next request
        return totals

    assert asyncio.run(scenario()) == pytest.approx([0.0065, 0.0065 + 0.0046])


def test_what_parsing_takes_is_counted_where_tenants_share_a_loop() -> None:
    busy_s = 0.01

    async def spend(scope: Any, receive: Any, send: Any) -> None: ...

    async def scenario() -> float:
        config = uvicorn.Config(spend, http=HeadTimeoutProtocol, lifespan="off", log_config=None)
        config.load()
        protocol = HeadTimeoutProtocol(config, ServerState(), {})
        parsing = protocol.parsing = ParsingTime(0.0)
        ours, theirs = socket.socketpair()
        with theirs:
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(lambda: protocol, sock=ours)
            usual = protocol.parser

            class SlowParser:
                def __getattr__(self, name: str) -> Any:
                    return getattr(usual, name)

                def feed_data(self, data: bytes) -> None:
                    until_s = time.thread_time() + busy_s
                    while time.thread_time() < until_s:
                        pass
                    usual.feed_data(data)

            protocol.parser = SlowParser()  # type: ignore[assignment]
            protocol.data_received(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n")
            assert protocol.scope[PARSING] is parsing  # type: ignore[literal-required]
            transport.close()
            return float(parsing.take())

    assert asyncio.run(scenario()) >= busy_s


def test_a_tenants_bodies_under_way_are_bounded_together() -> None:
    async def scenario() -> list[int]:
        gate, statuses = asyncio.Event(), list[int]()

        async def hold(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await gate.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def receive() -> dict[str, Any]:
            return part(b"x" * 10)

        limits = BodyLimits(hold, max_bytes=10, stall_s=60)
        scope = {"type": "http", "path": "/v1/x", "headers": []}
        held = [asyncio.create_task(limits(scope, receive, send)) for _ in range(4)]
        await asyncio.sleep(0)
        await limits(scope, receive, send)
        gate.set()
        await asyncio.gather(*held)
        await limits(scope, receive, send)
        return statuses

    assert asyncio.run(scenario()) == [429, 200, 200, 200, 200, 200]


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (r'"\ud800"', r"\ud800"),
        (r'"\uDFFF"', r"\uDFFF"),
        (r'"\ud83d\ude00"', None),
        (r'"\ud83d \ude00"', r"\ud83d"),
        (r'"\ud83d\ud83d\ude00"', r"\ud83d"),
        (r'"\\ud800"', None),  # a backslash, then letters
        (r'"\\\ud800"', r"\ud800"),
        (r'"\u00e9\n\ud83d"', r"\ud83d"),
        ('"plain"', None),
    ],
)
def test_half_characters_are_found_and_whole_ones_are_not(text: str, half: str | None) -> None:
    expected = None if half is None else f"{half} is half of a surrogate pair; send both halves"
    assert find_text_error(text.encode()) == expected
    spelled = json.loads(text)
    try:
        spelled.encode()
    except UnicodeEncodeError:
        assert half is not None
    else:
        assert half is None


@pytest.mark.parametrize(
    "body",
    [b'"\xed\xa0\x80"', b'"\xff"', '"a"'.encode("utf-16"), '"a"'.encode("utf-16-le")],
    ids=["surrogate", "no UTF-8", "UTF-16", "UTF-16 without its mark"],
)
def test_only_utf_8_passes_as_json_and_anything_does_as_bytes(body: bytes) -> None:
    status, told = call([part(body)])
    assert status == 422
    assert b"send UTF-8" in told
    kind = {b"content-type": b"application/octet-stream"}
    assert call([part(body)], kind) == (200, body)
