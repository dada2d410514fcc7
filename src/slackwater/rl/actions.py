"""A small client of the action service, for environments and rewards.

    async with ActionClient(url, key, job="my-run") as actions:
        async with actions.environment(files={"main.py": "print(42)"}) as place:
            result = await place.run("python3", "main.py", cores=[1, 2, 4])

Every action has a unique name, so that a retry after a lost connection never runs it twice. Full
queues (429) and restarts are retried within `patience_s`.
A general HTTP client takes longer to make a small request than the service to answer it. This one
knows one service, one request per connection at a time, and no redirects.
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

_HOLD_S = 20.0
_MOST_CONNECTIONS = 1024
T = TypeVar("T")

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
        """It ended normally with status 0."""
        return self.outcome == "done" and self.status == 0


@dataclass(frozen=True, slots=True)
class RewardScore:
    """A reward model's score of a text: the mean of `logprobs`."""

    score: float
    logprobs: Sequence[float]


class ActionClient:
    """One service, one job. Use it from one event loop."""

    def __init__(
        self, url: str, key: str, *, job: str = "default", patience_s: float = 120.0
    ) -> None:
        self._job = job
        self._patience_s = patience_s
        self._calls = ServiceCalls(
            url, key, silent_s=_HOLD_S + 20, most_connections=_MOST_CONNECTIONS
        )

    async def __aenter__(self) -> "ActionClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._calls.close()

    async def run(
        self, *command: str, environment: str | None = None, **given: Any
    ) -> ActionOutcome:
        """Run one action to its end; `given` are API fields such as cores, limit_s, stdin, limits.

        Cancelling this task cancels the action.
        """
        name = secrets.token_hex(12)
        body = {"command": list(command), "action": name, "job": self._job, "wait_s": _HOLD_S}
        if environment is not None:
            body["environment"] = environment
        try:
            answer = await self._ask("POST", "/slackwater/actions", body | given)
            while answer.status == 202:
                path = f"/slackwater/actions/{answer.said['action']}"
                answer = await self._ask("GET", f"{path}?wait_s={_HOLD_S:g}")
        except asyncio.CancelledError:
            with contextlib.suppress(CallError):
                await asyncio.shield(self._calls.ask("POST", f"/slackwater/actions/{name}/cancel"))
            raise
        return _result(answer.said)

    async def score(self, service: str, tokens: Sequence[int], **given: Any) -> "RewardScore":
        """Log-probs of a text's tokens but the first under a reward service, and their mean."""
        result = await self.run(service=service, tokens=list(tokens), **given)
        if not result.ok:
            raise UnavailableError(f"service {service}: {result.outcome}: {result.reason}")
        return RewardScore(**json.loads(result.stdout))

    @contextlib.asynccontextmanager
    async def environment(self, **given: Any) -> "AsyncIterator[ActionEnvironment]":
        """An environment inside the block; API fields: files, snapshot, memory_mib."""
        name = await self.open(**given)
        try:
            yield ActionEnvironment(self, name)
        finally:
            await self.close(name)

    async def open(self, **given: Any) -> str:
        """An environment that stays until it is closed; its name."""
        body = {"environment": secrets.token_hex(12), "job": self._job, "wait_s": _HOLD_S} | given
        answer = await self._ask("POST", "/slackwater/environments", body)
        return str(answer.said["environment"])

    async def close(self, environment: str) -> None:
        """Close it; a missing one is fine."""
        with contextlib.suppress(NotFoundError):
            await self._ask("DELETE", f"/slackwater/environments/{environment}")

    async def snapshot(self, environment: str, name: str) -> None:
        """Snapshot it, for others to start from."""
        path = f"/slackwater/environments/{environment}/snapshot"
        await self._ask("POST", path, {"snapshot": name})

    @contextlib.asynccontextmanager
    async def permit(self, **uses: int) -> AsyncIterator[None]:
        """Hold this much of some limits inside the block, for example a quota of an API."""
        body = {"action": secrets.token_hex(12), "job": self._job, "uses": uses}
        asked = (await self._ask("POST", "/slackwater/actions", body)).said["action"]
        path = f"/slackwater/actions/{asked}"
        while not (await self._ask("POST", f"{path}/held?wait_s={_HOLD_S:g}", {})).said["held"]:
            pass
        began_s = time.monotonic()
        try:
            yield
        finally:
            await self._ask("POST", f"{path}/done", {"ran_s": time.monotonic() - began_s})

    async def _ask(self, method: str, path: str, body: object = None) -> ServiceReply:
        """Ask until there is an answer that is not "later"."""
        deadline_s = time.monotonic() + self._patience_s
        pause_s = 0.05
        while True:
            try:
                answer = await self._calls.ask(method, path, body)
                if answer.status not in (429, 503):
                    return _checked(answer)
                why = str(answer.said)
            except CallError as error:
                why = str(error)
            if time.monotonic() + pause_s > deadline_s:
                raise UnavailableError(f"{path}: no answer within {self._patience_s:g} s: {why}")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class ActionEnvironment:
    """An environment: what runs in it finds what ran before."""

    client: ActionClient
    name: str

    async def run(self, *command: str, **given: Any) -> ActionOutcome:
        return await self.client.run(*command, environment=self.name, **given)

    async def snapshot(self, name: str) -> None:
        await self.client.snapshot(self.name, name)


def _checked(answer: ServiceReply) -> ServiceReply:
    if answer.status < 400:
        return answer
    found = answer.said.get("error") if isinstance(answer.said, dict) else None
    said = str(answer.said if found is None else found)
    if answer.status == 404:
        raise NotFoundError(said)
    if answer.status == 422:
        raise ConfigError(said)
    raise RefusedError(said)


def _result(said: dict[str, Any]) -> ActionOutcome:
    usage = said["usage"]
    return ActionOutcome(
        action=said["action"],
        outcome=said["outcome"],
        reason=said["reason"],
        status=said["status"],
        stdout=said["stdout"],
        stderr=said["stderr"],
        queued_s=usage["queued_s"],
        ran_s=usage["ran_s"],
        cores=usage["cores"],
        usage=usage,
    )


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
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.__aexit__(None, None, None)

    def do(self, work: Callable[[ActionClient], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Run a coroutine with the client; returns a future."""
        return asyncio.run_coroutine_threadsafe(work(self._client), self._loop)
