"""Bodies that are too large or too slow are answered with a clear error and a Content-Length."""

import asyncio
import json
from typing import Any

from slackwater.serve.http.limits import BodyLimits


def call(
    messages: list[dict[str, Any]], headers: dict[bytes, bytes] | None = None
) -> tuple[int, bytes]:
    """What the limits and an application that echoes answer; after `messages` the client is silent."""
    sent: list[dict[str, Any]] = []

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": message["body"]})

    async def receive() -> dict[str, Any]:
        if messages:
            await asyncio.sleep(0)
            return messages.pop()
        await asyncio.sleep(60)
        raise AssertionError("nobody waits so long")

    async def send(message: Any) -> None:
        sent.append(message)

    messages.reverse()
    scope = {"type": "http", "path": "/api/v1/x", "headers": list((headers or {}).items())}
    asyncio.run(BodyLimits(echo, max_bytes=10, stall_s=0.05, whole_s=0.3)(scope, receive, send))
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
    status, body = call([part(b"0", True)])
    assert status == 408
    assert "slowly" in json.loads(body)["error"]


def test_a_body_that_dribbles_for_too_long_is_given_up() -> None:
    assert call([part(b"", True) for _ in range(100_000)])[0] == 408


def test_nothing_is_answered_to_a_client_that_left() -> None:
    assert call([part(b"0", True), {"type": "http.disconnect"}]) == (0, b"")
