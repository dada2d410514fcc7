"""Limits on requests: size, speed, and share of the event loop.

Small JSON bodies are parsed on the event loop, large ones by helper processes (`large_bodies.py`).
With several tenants, a request waits until its tenant is within its share of the loop
(`runtime/services/loop_shares.py`). Accepting its connections and parsing its requests counts
towards that share, as does reading a large body.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater.model.ids import TenantId
from slackwater.runtime.services.loop_shares import LoopShares
from slackwater.serve.http.body_file import BodyFile
from slackwater.serve.http.body_reader import find_text_error
from slackwater.serve.http.encodings import RefusedBodyError, decompress, encoding_of
from slackwater.serve.http.errors import send_refusal
from slackwater.serve.http.large_bodies import BODY, LARGE_JSON_BYTES, TENANT
from slackwater.serve.http.whole_bodies import ReadBody, join_pieces

BODY_STALL_S = 10.0
_MIN_JSON_BYTES = 2 << 20
_MAX_ANONYMOUS_BYTES = LARGE_JSON_BYTES  # body limit without a known key
_LARGE_BYTES = 64 << 10  # beyond this size, reading a body counts towards the share
_READ_S_PER_BYTE = 0.4 / (64 << 20)  # loop time: beside others a tenant reads 64 MiB/s
_CONNECTION_S = 0.0003  # loop time of a connection's beginning and end
_MAX_BODIES_IN_FLIGHT = 4  # of the maximum size, per tenant
_ARRIVED = "slackwater.arrived_s"
PARSING = "slackwater.parsing"
_BINARY = ("application/x-protobuf", "application/octet-stream")


def max_json_bytes(longest_text: int, max_bytes: int) -> int:
    """Limit of JSON parsed on the event loop: enough for the longest text of any model."""
    return min(max(_MIN_JSON_BYTES, longest_text), max_bytes)


def arrival_s(scope: Scope) -> float | None:
    """When the request's head arrived, on the event loop's clock."""
    found: float | None = scope.get(_ARRIVED)
    return found


@dataclass(slots=True)
class ParsingTime:
    """Processor time that a connection took before its tenant was known."""

    seconds: float = _CONNECTION_S

    def take(self) -> float:
        """All of it since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken


class BodyLimits:
    """ASGI middleware: 413 for a large body, 408 for a slow one, 429 for too many bytes in flight.

    Compressed bodies are decompressed within the same limits. `json_limits` lists paths whose JSON
    may exceed `max_json_bytes` because helpers read it; their large bodies go to files of `folder`.
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
        self._in_flight: Counter[TenantId] = Counter()
        self._shares = shares or LoopShares(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_ARRIVED] = asyncio.get_running_loop().time()
        headers = Headers(scope=scope)
        tenant = self._tenant_of(headers)
        serving = self._serve(scope, receive, send, headers, tenant)
        if tenant is None:
            await serving
            return
        parsing: ParsingTime | None = scope.get(PARSING)
        self._shares.record_request(tenant)
        self._shares.charge(tenant, _CONNECTION_S if parsing is None else parsing.take())
        await self._shares.meter(tenant, serving)

    async def _serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: Headers,
        tenant: TenantId | None,
    ) -> None:
        body_bytes = _InFlightBytes(
            self._in_flight, tenant or TenantId(""), _MAX_BODIES_IN_FLIGHT * self._max_bytes
        )
        file = None
        try:
            try:
                limit = self._limit(scope["path"], headers, tenant)
                encoding = encoding_of(headers.get("content-encoding"))
                if self._folder is not None and scope["path"] in self._json_limits and not encoding:
                    file = BodyFile(self._folder)
                body = await self._read(receive, headers, tenant, body_bytes, limit, file)
                if body is None:
                    return
                if encoding:
                    body = await asyncio.to_thread(decompress, body, encoding, limit)
                    body_bytes.grow(len(body))
                    scope = {**scope, "headers": _without_encoding(scope)}
                small = len(body) <= LARGE_JSON_BYTES
                if small and _is_json(headers) and (why := find_text_error(body)):
                    raise RefusedBodyError(422, f"body: {why}")
            except RefusedBodyError as error:
                await send_refusal(scope, send, error.status, str(error))
                return
            replay = ReadBody(body, receive, None if file is None else file.path)
            if tenant is not None:
                await self._shares.wait_turn(tenant)
            await self._app({**scope, TENANT: tenant, BODY: replay}, replay, send)
        finally:
            body_bytes.release()
            if file is not None:
                file.close()

    def _limit(self, path: str, headers: Headers, tenant: TenantId | None) -> int:
        if tenant is None:
            return min(_MAX_ANONYMOUS_BYTES, self._max_bytes)
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
        """The whole body, empty if it is in the file; None if the client left."""
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            raise RefusedBodyError(413, f"body: {declared} bytes, must be at most {limit} bytes")
        pieces: list[bytes] = []
        clock = asyncio.get_running_loop().time
        latest_s = clock() + self._whole_s
        try:
            async with asyncio.timeout(min(self._stall_s, self._whole_s)) as timeout:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    pieces.append(message.get("body", b""))
                    body_bytes.grow(len(pieces[-1]))
                    if body_bytes.size > limit:
                        raise RefusedBodyError(413, f"body: must be at most {limit} bytes")
                    if body_bytes.size > _LARGE_BYTES and tenant is not None:
                        self._shares.charge(tenant, len(pieces[-1]) * _READ_S_PER_BYTE)
                        if file is not None:
                            file.write(pieces)
                            pieces.clear()
                    if not message.get("more_body", False):
                        return await join_pieces(pieces)
                    if body_bytes.size > _LARGE_BYTES and tenant is not None:
                        timeout.reschedule(latest_s)
                        await asyncio.sleep(self._shares.delay_s(tenant))
                    timeout.reschedule(min(clock() + self._stall_s, latest_s))
        except TimeoutError:
            raise RefusedBodyError(408, "body: arrived too slowly; send it faster") from None
        except OSError as error:
            why = f"body: {body_bytes.size} bytes cannot be stored ({error.strerror}); try again"
            raise RefusedBodyError(503, why) from None


def _without_encoding(scope: Scope) -> list[tuple[bytes, bytes]]:
    removed = (b"content-encoding", b"content-length")
    return [(name, value) for name, value in scope["headers"] if name not in removed]


def _is_json(headers: Headers) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind not in _BINARY


class _InFlightBytes:
    """Bytes of one body, counted for its tenant until the request ends."""

    def __init__(self, in_flight: Counter[TenantId], tenant: TenantId, limit_bytes: int) -> None:
        self.size = 0
        self._in_flight = in_flight
        self._tenant = tenant
        self._limit_bytes = limit_bytes

    def grow(self, more: int) -> None:
        self.size += more
        self._in_flight[self._tenant] += more
        total = self._in_flight[self._tenant]
        if total > self._limit_bytes:
            fix = f"must be at most {self._limit_bytes}; try again"
            raise RefusedBodyError(429, f"body: {total} bytes of yours are in flight, {fix}")

    def release(self) -> None:
        self._in_flight[self._tenant] -= self.size
