"""Calls of one service over kept connections: JSON in, JSON out.

A general HTTP client takes longer to make a small request than the service to answer it. This one
knows one service, one request per connection at a time, and no redirects.
"""

import asyncio
import json
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import httptools

from slackwater.model.errors import ConfigError

_CONNECT_WITHIN_S = 10.0
_PATH_SIGNS = "/?&=%"
_SLOWEST_BYTES_PER_S = 1 << 20  # of a body on its way there


class CallError(Exception):
    """No answer arrived; the service may or may not have received the call."""


@dataclass(frozen=True, slots=True)
class ServiceReply:
    """The service's reply, as JSON if possible, else text."""

    status: int
    said: Any


class ServiceCalls:
    """For one event loop; a call fails after `silent_s` without data."""

    def __init__(self, url: str, key: str, *, silent_s: float, most_connections: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError.of("url", url, "must be such as http://127.0.0.1:8123")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._context = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._silent_s = silent_s
        if not (key.isascii() and key.isprintable()):
            raise ConfigError.of("key", key, "must be the key that `slackwater up` printed")
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nX-API-Key: {key}\r\n"
        self._room = asyncio.Semaphore(most_connections)
        self._kept: list[_Line] = []
        self._busy: set[_Line] = set()

    async def ask(self, method: str, path: str, body: object = None) -> ServiceReply:
        """One call; CallError if no answer comes."""
        sent = b"" if body is None else json.dumps(body).encode()
        kind = "" if body is None else "Content-Type: application/json\r\n"
        place = quote(self._path + path, _PATH_SIGNS)
        head = f"{method} {place} HTTP/1.1\r\n{self._head}{kind}Content-Length: {len(sent)}\r\n\r\n"
        async with self._room:
            line = await self._line()
            self._busy.add(line)
            try:
                answer = await line.ask(head.encode("ascii") + sent, self._silent_s)
            except BaseException:
                # Also one that was cancelled: what comes on the line is not the next one's.
                line.close()
                raise
            finally:
                self._busy.discard(line)
            if line.is_open:
                self._kept.append(line)
            return answer

    async def _line(self) -> "_Line":
        while self._kept:
            line = self._kept.pop()
            if line.is_open:
                return line
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_WITHIN_S):
                _, line = await loop.create_connection(
                    _Line, self._host, self._port, ssl=self._context
                )
        except (OSError, TimeoutError) as error:
            raise CallError(f"no connection: {error or type(error).__name__}") from None
        return line

    def close(self) -> None:
        """Disconnect; running calls fail with CallError."""
        for line in (*self._kept, *self._busy):
            line.close()
        self._kept.clear()


class _Line(asyncio.Protocol):
    """One connection, one call at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._waiting: asyncio.Future[ServiceReply] | None = None
        self._body: list[bytes] = []
        self._heard_s = 0.0
        self.is_open = False

    async def ask(self, request: bytes, silent_s: float) -> ServiceReply:
        loop = asyncio.get_running_loop()
        assert self._transport is not None
        assert self._waiting is None
        answer: asyncio.Future[ServiceReply] = loop.create_future()
        self._waiting = answer
        self._heard_s = loop.time() + len(request) / _SLOWEST_BYTES_PER_S
        self._transport.write(request)
        watch = loop.call_later(silent_s, self._look, loop, silent_s, answer)
        try:
            return await answer
        finally:
            self._waiting = None
            watch.cancel()

    def _look(
        self,
        loop: asyncio.AbstractEventLoop,
        silent_s: float,
        answer: "asyncio.Future[ServiceReply]",
    ) -> None:
        """Fail a call whose service has been silent too long."""
        if answer is not self._waiting or answer.done():
            return
        left_s = self._heard_s + silent_s - loop.time()
        if left_s <= 0:
            self._fail(f"nothing was heard for {silent_s:g} s")
        else:
            loop.call_later(left_s, self._look, loop, silent_s, answer)

    def _fail(self, why: str) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(CallError(why))
        self.close()

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # ---- what the event loop tells ----
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"what came is not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection ended: {error or 'closed by the service'}")

    # ---- what the parser tells ----
    def on_message_begin(self) -> None:
        self._body = []

    def on_body(self, piece: bytes) -> None:
        self._body.append(piece)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.is_open = False
        if self._waiting is None or self._waiting.done():
            self.close()  # an answer that nobody asked for
            return
        text = b"".join(self._body)
        self._body = []
        said: Any
        try:
            said = json.loads(text)
        except ValueError:
            said = text.decode(errors="replace")
        self._waiting.set_result(ServiceReply(self._parser.get_status_code(), said))
