"""Limits on requests: size, speed, and share of the event loop.

Small JSON bodies are parsed on the event loop, large ones by helper processes (`large_bodies.py`).
With several tenants, a request starts when its tenant has not exceeded its share of the loop
(`runtime/services/loop_shares.py`), which large bodies count towards while they are read.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater.model.ids import TenantId
from slackwater.runtime.services.loop_shares import LoopShares
from slackwater.serve.http.body_file import BodyFile
from slackwater.serve.http.body_reader import broken_text
from slackwater.serve.http.encodings import RefusedBodyError, decompress, encoding_of
from slackwater.serve.http.errors import send_refusal
from slackwater.serve.http.large_bodies import BODY, LARGE_JSON_BYTES, TENANT
from slackwater.serve.http.whole_bodies import ReadBody, join_pieces

BODY_STALL_S = 10.0
_LEAST_JSON_BYTES = 2 << 20
_STRANGERS_BYTES = LARGE_JSON_BYTES  # what may be sent without a key that is known
_LARGE_BYTES = 64 << 10  # from here on what is read of a body is counted
_READ_S = 0.4 / (64 << 20)  # of the loop for a byte: beside others a tenant reads 64 MiB a second
_UNSEEN_S = 0.0003  # of the loop for a connection and a request's head, which nobody else counts
_BODIES_AT_ONCE = 4  # of the largest size, by one tenant
_ARRIVED = "slackwater.arrived_s"
_BINARY = ("application/x-protobuf", "application/octet-stream")


def max_json_bytes(longest_text: int, max_bytes: int) -> int:
    """Of JSON that is read on the event loop, as long as the longest text that a model takes."""
    return min(max(_LEAST_JSON_BYTES, longest_text), max_bytes)


def arrival_s(scope: Scope) -> float | None:
    """When the request's head arrived, on the event loop's clock."""
    found: float | None = scope.get(_ARRIVED)
    return found


class BodyLimits:
    """ASGI middleware: 413 for a large body, 408 for a slow one, 429 for too many bytes in flight.

    Compressed bodies are decompressed within the same limits. `json_limits` lists paths whose JSON
    may exceed `max_json_bytes`, because helpers read it: large bodies go to a file of `folder`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_bytes: int,
        stall_s: float,
        whole_s: float = 120.0,
        max_json_bytes: int | None = None,
        json_limits: Mapping[str, int] | None = None,
        tenant_of: Callable[[Headers], TenantId | None] = lambda headers: TenantId(""),
        shares: LoopShares | None = None,
        folder: Path | None = None,
    ) -> None:
        self._app, self._folder = app, folder
        self._max_bytes = max_bytes
        self._max_json_bytes = max_bytes if max_json_bytes is None else max_json_bytes
        self._json_limits = json_limits or {}
        self._stall_s = stall_s
        self._whole_s = whole_s
        self._tenant_of = tenant_of
        self._under_way: Counter[TenantId] = Counter()
        self._shares = shares or LoopShares(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_ARRIVED] = asyncio.get_running_loop().time()
        headers = Headers(scope=scope)
        tenant = self._tenant_of(headers)
        if tenant is not None:
            self._shares.record_request(tenant)
            self._shares.charge(tenant, _UNSEEN_S)
        body_bytes = _InFlightBytes(
            self._under_way, tenant or TenantId(""), _BODIES_AT_ONCE * self._max_bytes
        )
        file = None
        try:
            try:
                limit = self._limit(scope["path"], headers, tenant)
                encoding = encoding_of(headers.get("content-encoding"))
                if self._folder is not None and scope["path"] in self._json_limits and not encoding:
                    file = BodyFile(self._folder)
                body = await self._read(receive, headers, tenant, body_bytes, limit, file)
                if body is not None and encoding:
                    body = await asyncio.to_thread(decompress, body, encoding, limit)
                    body_bytes.grow(len(body))
                    scope = {**scope, "headers": _without_encoding(scope)}
            except RefusedBodyError as error:
                await send_refusal(scope, send, error.status, str(error))
                return
            small = body is not None and len(body) <= LARGE_JSON_BYTES
            if body is not None and small and _is_json(headers) and (broken := broken_text(body)):
                await send_refusal(scope, send, 422, f"body: {broken}")
            elif body is not None:
                path = None if file is None else file.path
                await self._pass_on(scope, ReadBody(body, receive, path), send, tenant)
        finally:
            body_bytes.release()
            if file is not None:
                file.close()

    def _limit(self, path: str, headers: Headers, tenant: TenantId | None) -> int:
        if tenant is None:
            return min(_STRANGERS_BYTES, self._max_bytes)
        if not _is_json(headers):
            return self._max_bytes
        return min(self._json_limits.get(path, self._max_json_bytes), self._max_bytes)

    async def _read(
        self,
        receive: Receive,
        headers: Headers,
        tenant: TenantId | None,
        body_bytes: "_InFlightBytes",
        limit: int,
        file: BodyFile | None,
    ) -> bytes | None:
        """The whole body, empty where it is in the file; None if the client left."""
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            raise RefusedBodyError(413, f"body: {declared} bytes, must be at most {limit} bytes")
        pieces: list[bytes] = []
        clock = asyncio.get_running_loop().time
        latest_s = clock() + self._whole_s
        try:
            async with asyncio.timeout(min(self._stall_s, self._whole_s)) as patience:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    pieces.append(message.get("body", b""))
                    body_bytes.grow(len(pieces[-1]))
                    if body_bytes.size > limit:
                        raise RefusedBodyError(413, f"body: must be at most {limit} bytes")
                    if body_bytes.size > _LARGE_BYTES and tenant is not None:
                        self._shares.charge(tenant, len(pieces[-1]) * _READ_S)
                        if file is not None:
                            file.write(pieces)
                            pieces.clear()
                    if not message.get("more_body", False):
                        return await join_pieces(pieces)
                    if body_bytes.size > _LARGE_BYTES and tenant is not None:
                        patience.reschedule(latest_s)
                        await asyncio.sleep(self._shares.delay_s(tenant))
                    patience.reschedule(min(clock() + self._stall_s, latest_s))
        except TimeoutError:
            raise RefusedBodyError(408, "body: it came too slowly") from None
        except OSError as error:
            why = f"body: {body_bytes.size} bytes cannot be kept ({error.strerror}); try again"
            raise RefusedBodyError(503, why) from None

    async def _pass_on(
        self, scope: Scope, body: ReadBody, send: Send, tenant: TenantId | None
    ) -> None:
        scope = {**scope, TENANT: tenant, BODY: body}
        if tenant is None:
            await self._app(scope, body, send)
            return
        await self._shares.wait_turn(tenant)
        await self._shares.meter(tenant, self._app_call(scope, body, send))

    async def _app_call(self, scope: Scope, body: ReadBody, send: Send) -> None:
        await self._app(scope, body, send)


def _without_encoding(scope: Scope) -> list[tuple[bytes, bytes]]:
    gone = (b"content-encoding", b"content-length")
    return [(name, value) for name, value in scope["headers"] if name not in gone]


def _is_json(headers: Headers) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind not in _BINARY


class _InFlightBytes:
    """The bytes of one body, counted to its tenant until the request is over."""

    def __init__(self, under_way: Counter[TenantId], tenant: TenantId, most: int) -> None:
        self.size = 0
        self._under_way = under_way
        self._tenant = tenant
        self._most = most

    def grow(self, more: int) -> None:
        self.size += more
        self._under_way[self._tenant] += more
        total = self._under_way[self._tenant]
        if total > self._most:
            why = f"body: {total} bytes of yours are under way, must be at most {self._most}"
            raise RefusedBodyError(429, f"{why}; try again")

    def release(self) -> None:
        self._under_way[self._tenant] -= self.size
