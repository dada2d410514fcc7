"""A small client of the action service, for environments and rewards.

    async with ActionClient(url, key, job="my-run") as actions:
        async with actions.environment(files={"main.py": "print(42)"}) as environment:
            result = await environment.run("python3", "main.py", cores=[1, 2, 4])

Every action has a unique name, so that a retry after a lost connection never runs it twice. Full
queues (429) and restarts are retried within `patience_s`.

A general HTTP client spends more time on a small request than the service does. This one knows one
service, sends one request per connection at a time, and follows no redirects.
"""

import asyncio
import contextlib
import json
import secrets
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httptools

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError, UnavailableError

_LONG_POLL_S = 20.0
_MAX_CONNECTIONS = 1024
T = TypeVar("T")

_CONNECT_WITHIN_S = 10.0
_SAFE_CHARACTERS = "/?&=%"
_MIN_UPLOAD_BYTES_PER_S = 1 << 20  # the upload rate below which a call counts as silent


class CallError(Exception):
    """No answer arrived; the service may or may not have received the call."""


@dataclass(frozen=True, slots=True)
class ServiceReply:
    """The service's reply, as JSON if possible, else text."""

    status: int
    content: Any


class ServiceCalls:
    """HTTP calls from one event loop; a call fails after `silent_s` without data."""

    def __init__(self, url: str, key: str, *, silent_s: float, max_connections: int) -> None:
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
        self._slots = asyncio.Semaphore(max_connections)
        self._idle: list[_HttpConnection] = []
        self._busy: set[_HttpConnection] = set()

    async def ask(self, method: str, path: str, body: object = None) -> ServiceReply:
        """One call; CallError if no answer comes."""
        payload = b"" if body is None else json.dumps(body).encode()
        content_type = "" if body is None else "Content-Type: application/json\r\n"
        target = quote(self._path + path, _SAFE_CHARACTERS)
        length = f"Content-Length: {len(payload)}\r\n"
        head = f"{method} {target} HTTP/1.1\r\n{self._head}{content_type}{length}\r\n"
        async with self._slots:
            connection = await self._connect()
            self._busy.add(connection)
            try:
                reply = await connection.ask(head.encode("ascii") + payload, self._silent_s)
            except BaseException:
                # Also after a cancellation: its late reply must not answer the next call.
                connection.close()
                raise
            finally:
                self._busy.discard(connection)
            if connection.is_open:
                self._idle.append(connection)
            return reply

    async def _connect(self) -> "_HttpConnection":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_WITHIN_S):
                _, connection = await loop.create_connection(
                    _HttpConnection, self._host, self._port, ssl=self._context
                )
        except (OSError, TimeoutError) as error:
            raise CallError(f"no connection: {error or type(error).__name__}") from None
        return connection

    def close(self) -> None:
        """Disconnect; running calls fail with CallError."""
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()


class _HttpConnection(asyncio.Protocol):
    """One connection, one call at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._pending: asyncio.Future[ServiceReply] | None = None
        self._body: list[bytes] = []
        self._last_data_s = 0.0
        self.is_open = False

    async def ask(self, request: bytes, silent_s: float) -> ServiceReply:
        loop = asyncio.get_running_loop()
        assert self._transport is not None
        assert self._pending is None
        reply: asyncio.Future[ServiceReply] = loop.create_future()
        self._pending = reply
        self._last_data_s = loop.time() + len(request) / _MIN_UPLOAD_BYTES_PER_S
        self._transport.write(request)
        watch = loop.call_later(silent_s, self._check_silence, loop, silent_s, reply)
        try:
            return await reply
        finally:
            self._pending = None
            watch.cancel()

    def _check_silence(
        self,
        loop: asyncio.AbstractEventLoop,
        silent_s: float,
        reply: "asyncio.Future[ServiceReply]",
    ) -> None:
        """Fail the call if the service has been silent for too long."""
        if reply is not self._pending or reply.done():
            return
        left_s = self._last_data_s + silent_s - loop.time()
        if left_s <= 0:
            self._fail(f"the service sent nothing for {silent_s:g} s")
        else:
            loop.call_later(left_s, self._check_silence, loop, silent_s, reply)

    def _fail(self, reason: str) -> None:
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(CallError(reason))
        self.close()

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # ---- called by the event loop ----
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._last_data_s = asyncio.get_running_loop().time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the reply is not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection ended: {error or 'closed by the service'}")

    # ---- called by the parser ----
    def on_message_begin(self) -> None:
        self._body = []

    def on_body(self, chunk: bytes) -> None:
        self._body.append(chunk)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.is_open = False
        if self._pending is None or self._pending.done():
            self.close()  # an unexpected reply
            return
        text = b"".join(self._body)
        self._body = []
        content: Any
        try:
            content = json.loads(text)
        except ValueError:
            content = text.decode(errors="replace")
        self._pending.set_result(ServiceReply(self._parser.get_status_code(), content))


@dataclass(frozen=True, slots=True)
class ActionOutcome:
    """How an action ended. `outcome` is done, failed, timed_out, cancelled, lost or refused."""

    action: str
    outcome: str
    reason: str
    status: int | None
    stdout: str
    stderr: str
    queued_s: float
    ran_s: float
    cores: int
    usage: Mapping[str, float]

    @property
    def ok(self) -> bool:
        """Whether it ended normally with status 0."""
        return self.outcome == "done" and self.status == 0


@dataclass(frozen=True, slots=True)
class RewardScore:
    """A reward model's score of a text: the mean of `logprobs`."""

    score: float
    logprobs: Sequence[float]


class ActionClient:
    """A client for one service and one job. Use it from one event loop."""

    def __init__(
        self, url: str, key: str, *, job: str = "default", patience_s: float = 120.0
    ) -> None:
        self._job = job
        self._patience_s = patience_s
        self._calls = ServiceCalls(
            url, key, silent_s=_LONG_POLL_S + 20, max_connections=_MAX_CONNECTIONS
        )

    async def __aenter__(self) -> "ActionClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._calls.close()

    async def run(
        self, *command: str, environment: str | None = None, **fields: Any
    ) -> ActionOutcome:
        """Run one action to its end; `fields` are API fields such as cores, limit_s, stdin, limits.

        Cancelling this task cancels the action.
        """
        name = secrets.token_hex(12)
        body = {"command": list(command), "action": name, "job": self._job, "wait_s": _LONG_POLL_S}
        if environment is not None:
            body["environment"] = environment
        try:
            reply = await self._request("POST", "/slackwater/actions", body | fields)
            while reply.status == 202:
                path = f"/slackwater/actions/{reply.content['action']}"
                reply = await self._request("GET", f"{path}?wait_s={_LONG_POLL_S:g}")
        except asyncio.CancelledError:
            with contextlib.suppress(CallError):
                await asyncio.shield(self._calls.ask("POST", f"/slackwater/actions/{name}/cancel"))
            raise
        return _parse_outcome(reply.content)

    async def score(self, service: str, tokens: Sequence[int], **fields: Any) -> "RewardScore":
        """Log-probs of a text's tokens but the first under a reward service, and their mean."""
        result = await self.run(service=service, tokens=list(tokens), **fields)
        if not result.ok:
            raise UnavailableError(f"service {service}: {result.outcome}: {result.reason}")
        return RewardScore(**json.loads(result.stdout))

    @contextlib.asynccontextmanager
    async def environment(self, **fields: Any) -> "AsyncIterator[ActionEnvironment]":
        """An environment inside the block; API fields: files, snapshot, memory_mib."""
        name = await self.open(**fields)
        try:
            yield ActionEnvironment(self, name)
        finally:
            await self.close(name)

    async def open(self, **fields: Any) -> str:
        """Open an environment that stays until it is closed; returns its name."""
        body = {
            "environment": secrets.token_hex(12),
            "job": self._job,
            "wait_s": _LONG_POLL_S,
        } | fields
        reply = await self._request("POST", "/slackwater/environments", body)
        return str(reply.content["environment"])

    async def close(self, environment: str) -> None:
        """Close an environment; a missing one is fine."""
        with contextlib.suppress(NotFoundError):
            await self._request("DELETE", f"/slackwater/environments/{environment}")

    async def snapshot(self, environment: str, name: str) -> None:
        """Snapshot an environment, for others to start from."""
        path = f"/slackwater/environments/{environment}/snapshot"
        await self._request("POST", path, {"snapshot": name})

    @contextlib.asynccontextmanager
    async def permit(self, **uses: int) -> AsyncIterator[None]:
        """Take these amounts of limits inside the block, for example of an API quota."""
        body = {"action": secrets.token_hex(12), "job": self._job, "uses": uses}
        action = (await self._request("POST", "/slackwater/actions", body)).content["action"]
        path = f"/slackwater/actions/{action}"
        held = f"{path}/held?wait_s={_LONG_POLL_S:g}"
        while not (await self._request("POST", held, {})).content["held"]:
            pass
        began_s = time.monotonic()
        try:
            yield
        finally:
            await self._request("POST", f"{path}/done", {"ran_s": time.monotonic() - began_s})

    async def _request(self, method: str, path: str, body: object = None) -> ServiceReply:
        """Call until the reply is not 429 or 503, for up to `patience_s`."""
        deadline_s = time.monotonic() + self._patience_s
        pause_s = 0.05
        while True:
            try:
                reply = await self._calls.ask(method, path, body)
                if reply.status not in (429, 503):
                    return _raise_for_status(reply)
                reason = str(reply.content)
            except CallError as error:
                reason = str(error)
            if time.monotonic() + pause_s > deadline_s:
                raise UnavailableError(f"{path}: no answer within {self._patience_s:g} s: {reason}")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class ActionEnvironment:
    """An environment; its files persist between actions."""

    client: ActionClient
    name: str

    async def run(self, *command: str, **fields: Any) -> ActionOutcome:
        return await self.client.run(*command, environment=self.name, **fields)

    async def snapshot(self, name: str) -> None:
        await self.client.snapshot(self.name, name)


def _raise_for_status(reply: ServiceReply) -> ServiceReply:
    if reply.status < 400:
        return reply
    error = reply.content.get("error") if isinstance(reply.content, dict) else None
    reason = str(reply.content if error is None else error)
    if reply.status == 404:
        raise NotFoundError(reason)
    if reply.status == 422:
        raise ConfigError(reason)
    raise RefusedError(reason)


def _parse_outcome(fields: dict[str, Any]) -> ActionOutcome:
    named = ("action", "outcome", "reason", "status", "stdout", "stderr", "usage")
    measured = {name: fields["usage"][name] for name in ("queued_s", "ran_s", "cores")}
    return ActionOutcome(**{name: fields[name] for name in named}, **measured)


class ActionThread:
    """`with ActionThread(url, key) as actions: actions.do(lambda c: c.run("true")).result()`"""

    def __init__(self, url: str, key: str, *, job: str = "default") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="actions", daemon=True)
        self._client = ActionClient(url, key, job=job)

    def __enter__(self) -> "ActionThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel running work and stop the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _close(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.__aexit__(None, None, None)

    def do(self, work: Callable[[ActionClient], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Run a coroutine with the client; returns a future."""
        return asyncio.run_coroutine_threadsafe(work(self._client), self._loop)
