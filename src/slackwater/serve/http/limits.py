"""Limits on what a client may send: how much, and how slowly."""

import asyncio
import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slackwater.serve.http.errors import error_body


class _TooLargeError(Exception):
    pass


class BodyLimits:
    """ASGI middleware: a body above `max_bytes` is a 413; one that stalls, or takes too long, a 408."""

    def __init__(
        self, app: ASGIApp, *, max_bytes: int, stall_s: float, whole_s: float = 120.0
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._stall_s = stall_s
        self._whole_s = whole_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            declared = int(dict(scope["headers"]).get(b"content-length", b"0") or b"0")
        except ValueError:
            declared = 0
        if declared > self._max_bytes:
            await self._refuse(scope, send, 413, f"body: {declared} bytes, {self._says()}")
            return
        try:
            async with asyncio.timeout(self._whole_s):
                body = await self._read(receive)
        except _TooLargeError:
            await self._refuse(scope, send, 413, f"body: {self._says()}")
            return
        except TimeoutError:
            await self._refuse(scope, send, 408, "body: it came too slowly")
            return
        if body is None:
            return
        await self._app(scope, _Replay(body, receive), send)

    def _says(self) -> str:
        return f"must be at most {self._max_bytes} bytes"

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client left."""
        pieces: list[bytes] = []
        size = 0
        while True:
            async with asyncio.timeout(self._stall_s):
                message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            size += len(piece)
            if size > self._max_bytes:
                raise _TooLargeError
            pieces.append(piece)
            if not message.get("more_body", False):
                return b"".join(pieces)

    async def _refuse(self, scope: Scope, send: Send, status: int, message: str) -> None:
        body = json.dumps(error_body(scope["path"], status, message)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class _Replay:
    """Gives the body that was read, then whatever else comes: the client's leaving."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()
