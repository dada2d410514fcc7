"""Turns on an engine server, which has one set of weights and several adapters.

Turns of the base and of adapters run concurrently, each adapter under the name of its version, so
that no turn ever sees another version's weights. Turns of whole versions run version by version.

While the server sleeps, and until it is awake again, turns and adapter changes wait: either would
crash it. A server that does not sleep or wake in time is ended, which frees its devices.

A moved turn continues by prefilling prompt and tokens with a new seed, since the server cannot
resume at a position of a random stream.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Literal

import numpy as np

from slackwater.model.errors import ConfigError, RefusedError, SlackwaterError, UnavailableError
from slackwater.wire import messages
from slackwater.wire.tokens import TokenColumns, TurnFinished, encode_tokens
from slackwater.worker.connection import Connection
from slackwater.worker.engine_server.server import EngineServer, ServerTokens
from slackwater.worker.engine_server.versions import VersionDirectories

logger = logging.getLogger(__name__)

_SEND_AFTER_S = 0.002
_POWER_CHANGE_WITHIN_S = 50.0  # to sleep or wake; less than the step tracker waits


class Outbox:
    """Collects tokens and sends them `_SEND_AFTER_S` after the first one."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._requests: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[list[tuple[int, float]]] = []
        self._finished: list[TurnFinished] = []
        self._is_flush_scheduled = False

    def add(self, request: int, sampled: ServerTokens) -> None:
        self._requests += [request] * len(sampled.tokens)
        self._tokens += sampled.tokens
        self._logprobs += sampled.logprobs
        self._top += sampled.top
        self._wake()

    def end(
        self, request: int, reason: Literal["stop", "length"], total_tokens: int, version: str
    ) -> None:
        """Send a request's ending with its last tokens."""
        self._finished.append(TurnFinished(request, reason, total_tokens, version))
        self._wake()

    def _wake(self) -> None:
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            asyncio.get_running_loop().call_later(_SEND_AFTER_S, self.flush)

    def flush(self) -> None:
        """One write: alternatives, then tokens and endings."""
        self._is_flush_scheduled = False
        frames: list[bytes] = []
        if any(self._top):
            frames.append(messages.encode(messages.SampledTopK(self._top)))
        if self._tokens or self._finished:
            columns = TokenColumns(
                self._requests, self._tokens, self._logprobs, finished=self._finished
            )
            frames.append(encode_tokens(columns))
        self._requests, self._tokens, self._logprobs = [], [], []
        self._top, self._finished = [], []
        if frames:
            self._send(*frames)


class ServerInstance:
    """Runs on one event loop; `handle_message` takes what the control plane says."""

    def __init__(
        self,
        connection: Connection,
        server: EngineServer,
        versions: VersionDirectories,
        base_version: str,
        *,
        neutral_adapter: str | None = None,
    ) -> None:
        """Turns of whole versions use `neutral_adapter`, if the server needs an adapter."""
        self._connection = connection
        self._server = server
        self._versions = versions
        self._base_version = base_version
        self._loaded_version: str | None = base_version
        self._adapters: dict[str, str] = {}  # names on the server by version
        self._neutral_adapter = neutral_adapter
        self._outbox = Outbox(connection.send)
        self._waiting: deque[messages.Generate] = deque()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._contexts: dict[int, int] = {}
        self._switching: asyncio.Task[None] | None = None
        self._loading_version: str | None = None
        self._awake = asyncio.Event()
        self._awake.set()
        self._server_lock = asyncio.Lock()  # orders sleep, wake and adapter changes
        self._power_changes = 0
        self.broken = ""
        self._to_drop: set[str] = set()  # once the server no longer reads or serves them
        self._tasks: set[asyncio.Task[None]] = set()
        self._produced_tokens = 0
        self._prefilled_tokens = 0

    def gauges(self) -> dict[str, float]:
        """Gauges for the heartbeat's thread."""
        return {
            "running": float(len(self._running)),
            "waiting": float(len(self._waiting)),
            "produced_tokens": float(self._produced_tokens),
            "prefilled_tokens": float(self._prefilled_tokens),
            "kv_used_tokens": float(sum(list(self._contexts.values()))),
        }

    def handle_message(self, message: messages.ToWorker) -> None:
        match message:
            case messages.Generate():
                self._waiting.append(message)
                self._start_waiting()
            case messages.Abort(request):
                self._abort(request)
            case messages.PullVersion():
                self._spawn(self._pull(message))
            case messages.DropVersion(version):
                self._spawn(self._drop(version))
            case messages.RestEngine(number):
                self._awake.clear()
                self._waiting.clear()
                for task in self._running.values():
                    task.cancel()
                self._queue_power_change(self._sleep(number))
            case messages.WakeEngine():
                self._queue_power_change(self._wake(self._power_changes + 1))
            case _:
                logger.warning("not for an engine: %s", type(message).__name__)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _queue_power_change(self, work: Coroutine[None, None, None]) -> None:
        self._power_changes += 1
        self._spawn(self._change_power(work))

    async def _change_power(self, work: Coroutine[None, None, None]) -> None:
        try:
            async with asyncio.timeout(_POWER_CHANGE_WITHIN_S), self._server_lock:
                await work
        except (SlackwaterError, TimeoutError) as error:
            logger.warning("server does not sleep or wake error=%r", error)
            self.broken = "did not sleep or wake"

    async def _sleep(self, number: int) -> None:
        if self._switching is not None:
            await asyncio.wait({self._switching})
        if self._running:
            await asyncio.wait(self._running.values())
        await self._server.sleep()
        self._connection.send(messages.encode(messages.EngineRested(number)))

    async def _wake(self, order: int) -> None:
        await self._server.wake()
        if order == self._power_changes:  # otherwise it has been told to sleep again
            self._awake.set()
            self._start_waiting()

    @contextlib.asynccontextmanager
    async def _keep_awake(self) -> AsyncIterator[None]:
        while True:
            await self._awake.wait()
            async with self._server_lock:
                if self._awake.is_set():
                    yield
                    return

    def _abort(self, request: int) -> None:
        for message in self._waiting:
            if message.request == request:
                self._waiting.remove(message)
                return
        task = self._running.get(request)
        if task is not None:
            task.cancel()

    async def _pull(self, message: messages.PullVersion) -> None:
        version = message.version
        self._to_drop.discard(version)
        try:
            kept = await asyncio.to_thread(
                self._versions.pull, version, message.way, keep=message.keep
            )
            await self._load_adapter(version)
        except (SlackwaterError, OSError) as error:
            self._connection.send(messages.encode(messages.VersionFailed(version, str(error))))
            return
        self._connection.send(messages.encode(messages.VersionReady(version, kept)))

    async def _load_adapter(self, version: str) -> None:
        """Load a version that is an adapter into the server; merge it if the server cannot."""
        directory = self._versions.adapter(version)
        if directory is None or version in self._adapters:
            return
        try:
            if not self._server.supports_adapters:
                raise RefusedError("it was started without runtime LoRA")
            # A server may outlive its adapter process: names must not repeat.
            name = f"{self._connection.name}-{version}"
            async with self._keep_awake():
                await self._server.load_adapter(name, directory)
            self._adapters[version] = name
        except SlackwaterError as error:
            logger.warning("adapter merged into the base version=%s error=%s", version, error)
            await asyncio.to_thread(self._versions.merge, version)

    async def _drop(self, version: str) -> None:
        if version in (self._loaded_version, self._loading_version):
            self._to_drop.add(version)
            return
        name = self._adapters.pop(version, None)
        self._versions.drop(version)
        if name is not None:
            with contextlib.suppress(SlackwaterError):  # it ends with the server
                async with self._keep_awake():
                    await self._server.unload_adapter(name)

    def _weights_for(self, version: str) -> str:
        """The whole version that must be loaded to sample from this one."""
        return self._base_version if version in self._adapters else version

    def _start_waiting(self) -> None:
        """Start waiting turns in order, never with two sets of whole weights at once."""
        while self._waiting and self._switching is None and self._awake.is_set():
            weights = self._weights_for(self._waiting[0].version)
            if weights == self._loaded_version:
                self._start(self._waiting.popleft())
            elif not self._running:
                loop = asyncio.get_running_loop()
                self._switching = loop.create_task(self._switch(weights))
            else:
                return

    def _start(self, message: messages.Generate) -> None:
        request = message.request
        self._running[request] = asyncio.get_running_loop().create_task(self._run(message))
        self._contexts[request] = (len(message.prompt) + len(message.generated)) // 4

    async def _switch(self, version: str) -> None:
        """Load another version; if that fails, refuse its turns."""
        # Until the load has succeeded, the server may have any weights.
        self._loaded_version, self._loading_version = None, version
        try:
            await self._server.load_weights(self._versions.directory(version), version)
            self._loaded_version = version
        except SlackwaterError as error:
            logger.warning("version not loaded version=%s error=%s", version, error)
            refused = [m for m in self._waiting if self._weights_for(m.version) == version]
            for message in refused:
                self._waiting.remove(message)
                self._refuse(message.request, error)
        finally:
            self._switching = self._loading_version = None
        to_drop, self._to_drop = self._to_drop, set()
        for each in to_drop:
            self._spawn(self._drop(each))  # it may wait for the server to wake
        self._start_waiting()

    async def _run(self, message: messages.Generate) -> None:
        request = message.request
        try:
            await self._generate(message)
        except asyncio.CancelledError:
            await self._server.abort(_request_name(self._connection, request))
        except SlackwaterError as error:
            self._refuse(request, error)
        except (LookupError, TypeError, ValueError) as error:
            failure = UnavailableError(
                f"{self._server.title}: its answer cannot be read: {error!r}"
            )
            self._refuse(request, failure)
        finally:
            del self._running[request], self._contexts[request]
            self._start_waiting()

    async def _generate(self, message: messages.Generate) -> None:
        request, sampling = message.request, message.sampling
        prompt = np.frombuffer(message.prompt, "<u4").tolist()
        generated = np.frombuffer(message.generated, "<u4").tolist()
        if sampling.target_prompt_tokens or sampling.prompt_alternatives:
            extras = "target_prompt_tokens and prompt_alternatives"
            raise RefusedError(f"{extras} are not supported by {self._server.title}")
        adapter = self._adapter_for(message.version)
        if message.score_prompt:
            logprobs, top = await self._server.score(
                prompt, sampling.topk_prompt_logprobs, adapter=adapter
            )
            self._connection.send(messages.encode(messages.PromptScores(request, logprobs, top)))
        total_tokens = len(generated)
        self._prefilled_tokens += len(prompt) + total_tokens
        name = _request_name(self._connection, request)
        stream = self._server.stream(
            name, prompt + generated, sampling, total_tokens, adapter=adapter
        )
        async for sampled in stream:
            total_tokens += len(sampled.tokens)
            self._produced_tokens += len(sampled.tokens)
            self._contexts[request] = len(prompt) + total_tokens
            self._outbox.add(request, sampled)
            if sampled.finish_reason is not None:
                self._finish(message, sampled.finish_reason, total_tokens)
                return
        raise ConfigError(f"{self._server.title} ended the stream without a reason")

    def _adapter_for(self, version: str) -> str | None:
        """The adapter to sample with; a dropped version must not be sampled from the base."""
        if version in self._adapters:
            return self._adapters[version]
        if version != self._loaded_version:
            raise RefusedError(f"version: {version!r} is not loaded any more")
        return self._neutral_adapter

    def _finish(self, message: messages.Generate, reason: str, total_tokens: int) -> None:
        if reason not in ("stop", "length"):
            failure = f"{self._server.title} ended it: {reason}"
            refusal = messages.GenerateRefused(message.request, failure, False)
            self._connection.send(messages.encode(refusal))
            return
        known: Literal["stop", "length"] = "stop" if reason == "stop" else "length"
        self._outbox.end(message.request, known, total_tokens, message.version)

    def _refuse(self, request: int, error: SlackwaterError) -> None:
        user_error = isinstance(error, ConfigError)
        self._outbox.flush()
        refusal = messages.GenerateRefused(request, str(error), user_error)
        self._connection.send(messages.encode(refusal))


def _request_name(connection: Connection, request: int) -> str:
    """A unique name: the server may serve several control planes one after the other."""
    return f"{connection.name}-{request}"
