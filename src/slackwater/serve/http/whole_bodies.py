"""Reads a request's body before its route is chosen."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slackwater.model.ids import TenantId
from slackwater.serve.http.body_file import HEADER
from slackwater.serve.http.large_bodies import BODY, TENANT

_JOINED_ELSEWHERE_BYTES = 1 << 20  # from this size on, join in a thread


class WholeBodies:
    """ASGI middleware behind front ends, which have limited the bodies that they forward."""

    def __init__(self, app: ASGIApp, tenant_of: Callable[[Headers], TenantId | None]) -> None:
        self._app = app
        self._tenant_of = tenant_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        headers = Headers(scope=scope)
        name = headers.get(HEADER.decode())
        body = ReadBody(await join_pieces(pieces), receive, None if name is None else Path(name))
        tenant = self._tenant_of(headers)
        await self._app({**scope, TENANT: tenant, BODY: body}, body, send)


async def join_pieces(pieces: Sequence[bytes]) -> bytes:
    """Concatenate the pieces, off the event loop if they are large."""
    if len(pieces) == 1:
        return pieces[0]
    if sum(map(len, pieces)) < _JOINED_ELSEWHERE_BYTES:
        return b"".join(pieces)
    return await asyncio.to_thread(b"".join, pieces)


class ReadBody:
    """Replays a body that was read, then passes on further messages (the disconnect)."""

    def __init__(self, body: bytes, receive: Receive, file: Path | None = None) -> None:
        """`file` has a large body instead (`BodyFile`)."""
        self.file = file
        self._body: bytes | None = body
        self._receive = receive

    def peek(self) -> bytes:
        """The body, without removing it."""
        return self._body or b""

    def take(self) -> bytes:
        """Remove and return the body; later receivers see only the client's disconnect."""
        body, self._body = self._body or b"", None
        return body

    async def __call__(self) -> Message:
        if self._body is not None:
            return {"type": "http.request", "body": self.take(), "more_body": False}
        return await self._receive()
