"""Connections of workers: who may come in, what they say, and when they are gone.

A peer has `hello_timeout_s` to say a hello with the secret. Garbage, oversized and truncated frames, a
silent peer and a closed connection all end the same way: the worker is lost, and everybody is told once.
"""

import asyncio
import contextlib
import hmac
import logging
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol

from slackwater.model.errors import SlackwaterError
from slackwater.model.ids import WorkerId
from slackwater.runtime.net.listening import bound_socket
from slackwater.wire import messages
from slackwater.wire.frames import Frame, FrameDecoder, FrameError, FrameKind

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
_LAST_LOOK_S = 0.5
_FRAMES_AT_ONCE = 4  # in a crowd: an engine that was not heard for a while has said thousands


class WorkerListener(Protocol):
    """Who is told about workers."""

    def worker_joined(self, hello: messages.Hello) -> None: ...
    def worker_said(self, worker: WorkerId, frames: Sequence[Frame]) -> None: ...
    def worker_lost(self, worker: WorkerId, reason: str) -> None: ...


class _TakenError(PermissionError):
    """The name is another connection's, which may be one that is not known to be dead yet."""


class WorkerHub:
    """Listens on the loopback, or on `listen` with `context` for workers of other machines; one connection per worker.

    While it is `crowded`, what came together is passed on in pieces, and others have the event loop in between.
    """

    def __init__(
        self,
        listener: WorkerListener,
        secret: str,
        *,
        heartbeat_every_s: float = 1.0,
        silent_after_s: float = 10.0,
        hello_timeout_s: float = 10.0,
        most_unread_bytes: int = 256 << 20,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        context: ssl.SSLContext | None = None,
        crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._crowded = crowded
        self._listener = listener
        self._secret = secret
        self._heartbeat_every_s = heartbeat_every_s
        self._silent_after_s = silent_after_s
        self._hello_timeout_s = hello_timeout_s
        self._most_unread_bytes = most_unread_bytes
        self._listen_on = listen
        self._context = context
        self._writers: dict[WorkerId, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ("127.0.0.1", 0)

    async def start(self) -> None:
        listening = bound_socket(*self._listen_on)
        self._server = await asyncio.start_server(
            self._serve, sock=listening, limit=1 << 20, ssl=self._context
        )
        self.address = listening.getsockname()[:2]

    async def close(self) -> None:
        """Tell everybody to stop, and hang up."""
        for worker in list(self._writers):
            self.send(worker, messages.Stop())
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(sorted(self._writers))

    def send(self, worker: WorkerId, message: messages.Message) -> None:
        """Send, if the worker is there; if it is not, its loss has been or will be told."""
        writer = self._writers.get(worker)
        if writer is None or writer.is_closing():
            return
        writer.write(messages.encode(message))
        if writer.transport.get_write_buffer_size() > self._most_unread_bytes:
            logger.warning("worker does not read worker=%s", worker)
            writer.transport.abort()

    def hang_up(self, worker: WorkerId) -> None:
        """Close a worker's connection."""
        writer = self._writers.get(worker)
        if writer is not None:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._talk(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = FrameDecoder()
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                hello, rest = await self._hello(reader, decoder)
        except (FrameError, TimeoutError, ConnectionError, PermissionError) as error:
            reason = str(error) or "no hello came in time"
            logger.warning("peer refused reason=%s", reason)
            with contextlib.suppress(ConnectionError):
                again = isinstance(error, _TakenError)
                writer.write(messages.encode(messages.Refused(reason, again)))
                await writer.drain()
            return
        worker = WorkerId(hello.worker)
        writer.write(messages.encode(messages.Welcome(self._heartbeat_every_s)))
        self._writers[worker] = writer
        try:
            self._listener.worker_joined(hello)
        except SlackwaterError as error:
            del self._writers[worker]
            logger.warning("peer refused reason=%s", error)
            writer.write(messages.encode(messages.Refused(str(error))))
            return
        reason = "the control plane is stopping"
        try:
            reason = await self._listen(worker, reader, decoder, rest)
        finally:
            del self._writers[worker]
            writer.close()
            self._listener.worker_lost(worker, reason)

    async def _hello(
        self, reader: asyncio.StreamReader, decoder: FrameDecoder
    ) -> tuple[messages.Hello, list[Frame]]:
        frames: list[Frame] = []
        while not frames:
            data = await reader.read(_READ_BYTES)
            if not data:
                raise ConnectionError("the peer left without a hello")
            frames = decoder.feed(data)
        if frames[0].kind is not FrameKind.CONTROL:
            raise FrameError("the first frame must be a hello")
        hello = messages.decode_from_worker(frames[0].body)
        if not isinstance(hello, messages.Hello):
            raise FrameError(f"the first message must be a hello, not {type(hello).__name__}")
        if hello.protocol != messages.PROTOCOL:
            raise FrameError(f"protocol {hello.protocol}, this process speaks {messages.PROTOCOL}")
        if not hmac.compare_digest(hello.secret.encode(), self._secret.encode()):
            raise PermissionError("the secret is wrong")
        if hello.worker in self._writers:
            raise _TakenError(f"worker {hello.worker} is connected already")
        return hello, frames[1:]

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """What came next. If this loop was held up, what came meanwhile is looked at before the clock is."""
        try:
            async with asyncio.timeout(self._silent_after_s):
                return await reader.read(_READ_BYTES)
        except TimeoutError:
            async with asyncio.timeout(_LAST_LOOK_S):
                return await reader.read(_READ_BYTES)

    async def _listen(
        self,
        worker: WorkerId,
        reader: asyncio.StreamReader,
        decoder: FrameDecoder,
        frames: Sequence[Frame],
    ) -> str:
        """Pass frames on until the connection ends; returns why it did."""
        try:
            while True:
                while frames:
                    some = _FRAMES_AT_ONCE if self._crowded() else len(frames)
                    self._listener.worker_said(worker, frames[:some])
                    frames = frames[some:]
                    if frames:
                        await asyncio.sleep(0)
                data = await self._read(reader)
                if not data:
                    decoder.finish()
                    return "it closed the connection"
                frames = decoder.feed(data)
        except TimeoutError:
            return f"nothing was heard of it for {self._silent_after_s:g} s"
        except FrameError as error:
            return str(error)
        except ConnectionError as error:
            return _torn(decoder) or str(error)


def _torn(decoder: FrameDecoder) -> str | None:
    """What a connection that broke inside a frame leaves behind."""
    try:
        decoder.finish()
    except FrameError as error:
        return str(error)
    return None
