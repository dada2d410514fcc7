"""Connections of workers: authenticates them, delivers their frames, and reports their loss.

A peer has `hello_timeout_s` to prove the key of its name and say hello; until then it may send
small frames only, and few such peers are served at a time. Garbage, oversized and truncated frames,
silence and a closed connection end the same way: the worker is lost, and reported once.
"""

import asyncio
import contextlib
import hmac
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from slackwater.model.errors import SlackwaterError
from slackwater.model.ids import WorkerId
from slackwater.runtime.net.listening import (
    MOST_STRANGERS,
    UnprovenPeers,
    accept_connections,
    bind_same_port,
)
from slackwater.runtime.net.worker_connection import WorkerConnection
from slackwater.wire import messages
from slackwater.wire.frames import (
    MAX_FRAME_BYTES,
    MAX_STRANGER_FRAME_BYTES,
    Frame,
    FrameDecoder,
    FrameError,
    FrameKind,
)
from slackwater.wire.messages import PROTOCOL
from slackwater.wire.proof import NONCE_BYTES, new_nonce, peer_proof, plane_proof

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20  # all that a reader holds
_BUFFER_BYTES = 1 << 16  # of every connection, also of unproven peers


class Credentials(Protocol):
    """What the hub asks about a peer: the key of its name, and whether its claims are plausible."""

    def key_of(self, request: messages.ConnectRequest) -> bytes | None:
        """The key of the name that wants to connect; None if nobody of that name is expected."""

    def check(self, request: messages.ConnectRequest, hello: messages.Hello) -> None:
        """A SlackwaterError if the peer, which has proved its name, claims what it may not."""


class WorkerListener(Protocol):
    """Gets the events of the hub."""

    def worker_joined(self, hello: messages.Hello) -> None: ...
    def handle_frames(self, worker: WorkerId, frames: Sequence[Frame]) -> None: ...
    def worker_lost(self, worker: WorkerId, reason: str) -> None: ...


class _TakenError(PermissionError):
    """Another connection has the name; it may be dead and not yet noticed."""


class _UnexpectedError(PermissionError):
    """No worker of that name is expected. The log says so, but the answer must not."""

    def __init__(self, worker: str) -> None:
        super().__init__(f"the key of {worker!r} is wrong")
        self.log_text = f"{worker!r} waits for its node's agent, which has not named it yet"


class WorkerHub:
    """Listens on the loopback, or on `listen` with `context`; one connection per worker.

    `before_send` gets every message before it is sent; `port_file` keeps the port across restarts.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        heartbeat_every_s: float = 1.0,
        silent_after_s: float = 10.0,
        hello_timeout_s: float = 10.0,
        most_unread_bytes: int = 256 << 20,
        most_strangers: int = MOST_STRANGERS,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        port_file: Path | None = None,
        context: ssl.SSLContext | None = None,
        before_send: Callable[[WorkerId, messages.Message], None] = lambda worker, message: None,
    ) -> None:
        self._before_send = before_send
        self._listener: WorkerListener | None = None
        self._credentials = credentials
        self._heartbeat_every_s = heartbeat_every_s
        self._silent_after_s = silent_after_s
        self._hello_timeout_s = hello_timeout_s
        self._most_unread_bytes = most_unread_bytes
        self._listen_on, self._port_file = listen, port_file
        self._context = context
        self._writers: dict[WorkerId, asyncio.StreamWriter] = {}
        self._strangers = UnprovenPeers(most_strangers, hello_timeout_s)
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ("127.0.0.1", 0)

    async def start(self, listener: WorkerListener) -> None:
        """Listen, and pass events of workers to `listener`."""
        self._listener = listener
        listening = bind_same_port(*self._listen_on, self._port_file)
        self.address = listening.getsockname()[:2]
        self._accepting = asyncio.create_task(self._accept(listening))

    async def close(self) -> None:
        """Tell every worker to stop, and close the connections."""
        for worker in list(self._writers):
            self.send(worker, messages.Stop())
        ending = [*self._tasks, *([] if self._accepting is None else [self._accepting])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(sorted(self._writers))

    def send(self, worker: WorkerId, message: messages.Message) -> None:
        """Send a message; if the worker is not connected, its loss has been or will be reported."""
        writer = self._writers.get(worker)
        if writer is None or (transport := writer.transport).is_closing():
            return
        self._before_send(worker, message)  # it may act on the message at once
        transport.write(messages.encode(message))
        if transport.get_write_buffer_size() > self._most_unread_bytes:
            logger.warning("worker does not read worker=%s", worker)
            transport.abort()

    def hang_up(self, worker: WorkerId) -> None:
        """Close a worker's connection."""
        writer = self._writers.get(worker)
        if writer is not None:
            writer.close()

    async def _accept(self, listening: socket.socket) -> None:
        async for connection, _ in accept_connections(listening):
            task = asyncio.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._end_connection)
            self._strangers.add(task, task.cancel)

    def _end_connection(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._strangers.remove(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a connection ended by an error", exc_info=error)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_BUFFER_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            connection.setblocking(False)
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context
            )
        except (OSError, asyncio.CancelledError) as error:  # no TLS, or not in time
            logger.warning("peer refused reason=%s", str(error) or "it did not begin in time")
            return  # asyncio closes the connection
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._talk(reader, writer)
        finally:
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = FrameDecoder(MAX_STRANGER_FRAME_BYTES)
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                request = await self._prove(reader, writer, decoder)
                self._strangers.remove(task)
                decoder.allow(MAX_FRAME_BYTES)
                hello, rest = await self._hello(request, reader, decoder)
        except asyncio.CancelledError:  # by `UnprovenPeers`, or because the hub closes
            self._refuse(writer, "no proof came in time, or too many others came", again=True)
            return
        except (FrameError, TimeoutError, OSError, SlackwaterError) as error:
            again = isinstance(error, _TakenError | TimeoutError)
            logged = error.log_text if isinstance(error, _UnexpectedError) else None
            self._refuse(writer, str(error) or "no hello came in time", again=again, logged=logged)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            return
        await self._keep(hello, reader, writer, decoder, rest)

    @staticmethod
    def _refuse(
        writer: asyncio.StreamWriter, reason: str, *, again: bool = False, logged: str | None = None
    ) -> None:
        """Tell the peer why; `logged` is what the log says instead."""
        logger.warning("peer refused reason=%s", logged or reason)
        writer.write(messages.encode(messages.HelloRefused(reason, again)))

    async def _keep(
        self,
        hello: messages.Hello,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: FrameDecoder,
        rest: Sequence[Frame],
    ) -> None:
        """Serve a worker until its connection ends."""
        listener = self._listener
        assert listener is not None
        worker = WorkerId(hello.worker)
        self._writers[worker] = writer
        try:
            listener.worker_joined(hello)
        except SlackwaterError as error:
            del self._writers[worker]
            self._refuse(writer, str(error))
            return
        reason = "the control plane is stopping"
        handle_frames = partial(listener.handle_frames, worker)
        connection = WorkerConnection(decoder, handle_frames, silent_after_s=self._silent_after_s)
        try:
            connection.take_over(cast("asyncio.Transport", writer.transport), reader, rest)
            reason = await connection.ended
        finally:
            del self._writers[worker]
            writer.close()
            listener.worker_lost(worker, reason)

    async def _prove(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: FrameDecoder
    ) -> messages.ConnectRequest:
        """The request of a peer that proved its key; the peer then knows the control plane."""
        request = messages.decode_from_stranger(await self._next_body(reader, decoder))
        if isinstance(request, messages.Hello):
            raise FrameError(f"protocol {request.protocol}, this process speaks {PROTOCOL}")
        if not isinstance(request, messages.ConnectRequest):
            raise FrameError(f"must begin with a ConnectRequest, not {type(request).__name__}")
        if request.protocol != PROTOCOL:
            raise FrameError(f"protocol {request.protocol}, this process speaks {PROTOCOL}")
        if len(request.nonce) != NONCE_BYTES:
            raise FrameError(f"the nonce has {len(request.nonce)} bytes, not {NONCE_BYTES}")
        ours = new_nonce()
        writer.write(messages.encode(messages.Challenge(ours)))
        answer = messages.decode_from_stranger(await self._next_body(reader, decoder))
        # Neither the time nor the answer may reveal which names are expected.
        key = self._credentials.key_of(request)
        nonces = request.nonce + ours
        wanted = peer_proof(key if key is not None else new_nonce(), request.worker, nonces)
        proof = answer.proof if isinstance(answer, messages.ChallengeResponse) else b""
        proved = hmac.compare_digest(proof, wanted)
        if key is None:
            raise _UnexpectedError(request.worker[:64])
        if not proved:
            raise PermissionError(f"the key of {request.worker[:64]!r} is wrong")
        welcomed = plane_proof(key, request.worker, nonces)
        writer.write(messages.encode(messages.Welcome(self._heartbeat_every_s, welcomed)))
        return request

    @staticmethod
    async def _next_frames(
        reader: asyncio.StreamReader, decoder: FrameDecoder, most_bytes: int, left: str
    ) -> list[Frame]:
        frames: list[Frame] = []
        while not frames:
            data = await reader.read(most_bytes)
            if not data:
                raise ConnectionError(f"the peer left {left}")
            frames = decoder.feed(data)
        return frames

    async def _next_body(self, reader: asyncio.StreamReader, decoder: FrameDecoder) -> bytes:
        """The one frame that a peer may send before it waits for an answer."""
        left, most_bytes = "before it had proved itself", MAX_STRANGER_FRAME_BYTES
        frames = await self._next_frames(reader, decoder, most_bytes, left)
        if len(frames) > 1 or frames[0].kind is not FrameKind.CONTROL:
            raise FrameError("a peer that has not proved itself sends one message at a time")
        return frames[0].body

    async def _hello(
        self,
        request: messages.ConnectRequest,
        reader: asyncio.StreamReader,
        decoder: FrameDecoder,
    ) -> tuple[messages.Hello, list[Frame]]:
        frames = await self._next_frames(reader, decoder, _READ_BYTES, "without a hello")
        if frames[0].kind is not FrameKind.CONTROL:
            raise FrameError("the first frame must be a hello")
        hello = messages.decode_from_worker(frames[0].body)
        if not isinstance(hello, messages.Hello):
            raise FrameError(f"the first message must be a hello, not {type(hello).__name__}")
        name = WorkerId(request.worker)
        if hello.worker != name:
            raise PermissionError(f"{name} says that it is {hello.worker[:64]!r}")
        if name in self._writers:
            raise _TakenError(f"worker {name} is connected already")
        self._credentials.check(request, hello)
        return hello, frames[1:]
