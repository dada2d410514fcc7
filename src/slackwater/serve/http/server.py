"""HTTP servers: uvicorn with a deadline on request heads, and a clean stop."""

import asyncio
import contextlib
import errno
import random
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slackwater.model.errors import RefusedError
from slackwater.serve.http.errors import send_refusal
from slackwater.serve.http.limits import PARSING, ParsingTime
from slackwater.serve.http.throttled_acceptor import (
    AT_ONCE,
    AT_ONCE_ALONE,
    LoopThrottle,
    ThrottledAcceptor,
)

if TYPE_CHECKING:
    from slackwater.runtime.plane import ControlPlane

T = TypeVar("T")
HEAD_DEADLINE_S = 10.0
MAX_HEAD_BYTES = 64 << 10
_BIND_AGAIN_S = 0.1
_PORT_FAULTS = (errno.EADDRINUSE, errno.EACCES)
_OPTIONS: dict[str, Any] = {
    "ws": "none",
    "lifespan": "off",
    "log_config": None,
    "access_log": False,
    "timeout_keep_alive": 75,
    "timeout_graceful_shutdown": 2,
    "server_header": False,
    "backlog": 2048,
}


def run_server(main: Coroutine[Any, Any, T]) -> T:
    """Run a server's main coroutine, on uvloop where that is installed."""
    # Other threads yield the GIL to the event loop soon: one request needs it about twenty times.
    sys.setswitchinterval(0.0002)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class HeadTimeoutProtocol(HttpToolsProtocol):
    """Closes a connection whose request head is late or too long.

    The first bytes of a new connection queue in `newcomers`, because its tenant is unknown until
    they are parsed.
    """

    _head_bytes = 0
    _deadline: asyncio.TimerHandle | None = None
    newcomers: LoopThrottle | None = None
    parsing: ParsingTime | None = None  # where tenants share the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it so too
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self.parsing is None:
            self._receive(data)
            return
        began_s = time.thread_time()
        self._receive(data)
        self.parsing.seconds += time.thread_time() - began_s

    def _receive(self, data: bytes) -> None:
        if self.newcomers is not None:
            self.transport.pause_reading()
            self.newcomers.put(partial(self._begin, data))
            self.newcomers = None
            return
        if self._deadline is not None:
            self._head_bytes += len(data)
        elif self.timeout_keep_alive_task is not None:
            self._expect_head()
            self._head_bytes = len(data)
        super().data_received(data)
        if self._deadline is not None and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.close()

    def _begin(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self.data_received(data)

    def on_headers_complete(self) -> None:
        self._cancel_head_deadline()
        self.scope[PARSING] = self.parsing  # type: ignore[literal-required]  # of ours
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size <= MAX_HEAD_BYTES:
            super().on_headers_complete()
            return
        usual, self.app = self.app, _refuse_head
        try:
            super().on_headers_complete()
        finally:
            self.app = usual

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_deadline()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._deadline = self.loop.call_later(HEAD_DEADLINE_S, self._close_slow)

    def _cancel_head_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_slow(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()


async def _refuse_head(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 431 to a request with too large a head."""
    message = f"headers: more than {MAX_HEAD_BYTES} bytes; send fewer or shorter ones"
    await send_refusal(scope, send, 431, message)


def bind(host: str, port: int) -> socket.socket:
    """Bind the listening socket before anything else is started; port 0 picks a free one."""
    # Below the ephemeral range: a client of a dead port above it can be connected to itself.
    candidates = [port] * 20 if port else random.sample(range(10_000, 20_000), 100)
    for number, candidate in enumerate(candidates):
        if port and number:  # front ends of a killed service release the port soon
            time.sleep(_BIND_AGAIN_S)
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, candidate))
            listening.listen(2048)  # from here on clients wait instead of being refused
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
            listening.close()
            why = error.strerror if isinstance(error, OSError) else "not the name of a host"
            if not isinstance(error, OSError) or error.errno not in _PORT_FAULTS:
                fix = f"cannot be listened on ({why}); give an address of this machine"
                raise RefusedError(f"--host: {host!r} {fix}") from None
        else:
            return listening
    raise RefusedError(f"--port: {host}:{port} cannot be bound ({why}); give another --port")


class _SignalFreeServer(uvicorn.Server):
    """Leaves signals to the process, which must stop after the last answer."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class PrivateServer(_SignalFreeServer):
    """Serves only front ends, and trusts their forwarded client addresses."""

    def __init__(self, app: FastAPI, path: Path) -> None:
        trusted: dict[str, Any] = {"uds": str(path), "forwarded_allow_ips": "*"}
        trusted["date_header"] = False  # front ends write it
        super().__init__(uvicorn.Config(app, http="httptools", **_OPTIONS, **trusted))
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wait without uvicorn's ten polls a second, which would wake the control plane."""
        await self.on_tick(0)
        await self._stopping.wait()


class HttpServer(_SignalFreeServer):
    """Accepts connections through `ThrottledAcceptor`."""

    def __init__(self, app: FastAPI, *, several_tenants: bool) -> None:
        super().__init__(uvicorn.Config(app, http=HeadTimeoutProtocol, **_OPTIONS))
        self._several_tenants = several_tenants
        self._at_once = AT_ONCE if several_tenants else AT_ONCE_ALONE
        self._newcomers = LoopThrottle(self._at_once)
        self._acceptors: list[ThrottledAcceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._acceptors = [
            ThrottledAcceptor(listening, self._new_protocol, self._at_once)
            for listening in sockets or ()
        ]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.stop_accepting()
        await super().shutdown(sockets)

    def stop_accepting(self) -> None:
        while self._acceptors:
            self._acceptors.pop().close()

    def _new_protocol(self) -> asyncio.Protocol:
        protocol = HeadTimeoutProtocol(self.config, self.server_state, self.lifespan.state)
        protocol.newcomers = self._newcomers
        if self._several_tenants:
            protocol.parsing = ParsingTime()
        return protocol


def catch_stop_signals() -> "asyncio.Future[int]":
    """The first SIGINT or SIGTERM from now on."""
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[int] = loop.create_future()

    def stop(number: int) -> None:
        if not signalled.done():
            signalled.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    return signalled


async def until_signalled(plane: "ControlPlane", signalled: "asyncio.Future[int]") -> int | None:
    """Wait for a signal (returns it), or for a fatal failure (returns None)."""
    dying = asyncio.create_task(plane.failed.wait())
    waits: set[asyncio.Future[Any]] = {dying, signalled}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    dying.cancel()
    return signalled.result() if signalled.done() else None
