"""Forwards requests to the control plane's HTTP application over a Unix socket."""

import asyncio
import contextlib
from pathlib import Path

import aiohttp
from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send
from yarl import URL

from slackwater.serve.http.body_file import HEADER
from slackwater.serve.http.errors import send_refusal
from slackwater.serve.http.large_bodies import BODY

# Headers of one connection, or set again for the forwarded request.
_DROPPED_REQUEST_HEADERS = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"te", b"upgrade"}
    | {b"expect", b"proxy-connection", b"x-forwarded-for", b"x-forwarded-proto", HEADER}
)
_DROPPED_RESPONSE_HEADERS = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date"})


class PassThrough:
    """ASGI application; expects the request body in the scope (`BODY`)."""

    def __init__(self, path: Path) -> None:
        connector = aiohttp.UnixConnector(str(path), limit=0, keepalive_timeout=60)
        self._client = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),  # never store or add cookies
            timeout=aiohttp.ClientTimeout(total=None),
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            read_bufsize=1 << 20,
            max_line_size=1 << 17,
            max_field_size=1 << 17,
        )

    async def close(self) -> None:
        await self._client.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        passing = asyncio.create_task(self._pass(scope, send))
        leaving = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not passing.done():
                passing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await passing

    async def _pass(self, scope: Scope, send: Send) -> None:
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        query: bytes = scope["query_string"]
        target = raw.partition(b"?")[0] + (b"?" + query if query else b"")
        url = URL(f"http://plane{target.decode('latin-1')}", encoded=True)
        has_started = False
        try:
            request = self._client.request(
                scope["method"],
                url,
                headers=_headers(scope),
                data=scope[BODY].take() or None,
                allow_redirects=False,
            )
            async with request as answer:
                headers = [
                    (name.lower(), value)
                    for name, value in answer.raw_headers
                    if name.lower() not in _DROPPED_RESPONSE_HEADERS
                ]
                start = {"type": "http.response.start", "status": answer.status}
                has_started = True
                await send({**start, "headers": headers})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except aiohttp.ClientError:
            if has_started:
                raise  # the server cuts the connection, so the client sees an incomplete answer
            await send_refusal(scope, send, 503, "the control plane does not answer; try again")


def _headers(scope: Scope) -> "CIMultiDict[str]":
    headers = CIMultiDict[str]()
    for name, value in scope["headers"]:
        if name not in _DROPPED_REQUEST_HEADERS:
            headers.add(name.decode("latin-1"), value.decode("latin-1"))
    if scope.get("client"):
        headers.add("x-forwarded-for", scope["client"][0])
    headers.add("x-forwarded-proto", scope["scheme"])
    if (file := scope[BODY].file) is not None:
        headers.add(HEADER.decode(), str(file))
    return headers


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
