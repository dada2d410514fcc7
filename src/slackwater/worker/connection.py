"""A worker's connection to the control plane: blocking, with a heartbeat of its own.

A worker never outlives the control plane: when the connection ends it leaves, even in the middle of an
operation, because nothing that it does then would be kept.
"""

import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from slackwater.model.errors import UnavailableError
from slackwater.wire import messages
from slackwater.wire.frames import FrameDecoder, FrameError, FrameKind

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
_HELLO_TIMEOUT_S = 20.0
EXIT_ORPHANED = 3


class HasFileno(Protocol):
    """Something that can be waited for."""

    def fileno(self) -> int: ...


class DisconnectedError(UnavailableError):
    """The control plane has gone."""


class Connection:
    """Messages in, frames out; `send` may be called from the heartbeat's thread too."""

    def __init__(self, address: tuple[str, int], hello: messages.Hello) -> None:
        self.name = hello.worker
        self._socket = socket.create_connection(address, timeout=_HELLO_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = FrameDecoder()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._gauges: Callable[[], dict[str, float]] = dict
        self._early: list[messages.ToWorker] = []
        self.send(messages.encode(hello))
        first, *self._early = self._read_some(_HELLO_TIMEOUT_S)
        if not isinstance(first, messages.Welcome):
            reason = first.reason if isinstance(first, messages.Refused) else repr(first)
            raise UnavailableError(f"the control plane refused this worker: {reason}")
        self._socket.settimeout(None)
        self._every_s = first.heartbeat_every_s

    def __enter__(self) -> "Connection":
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._socket.close()

    def report_gauges(self, gauges: Callable[[], dict[str, float]]) -> None:
        """What the heartbeat tells; called from its thread, so it must only read."""
        self._gauges = gauges

    def send(self, *frames: bytes) -> None:
        """Send whole frames, together."""
        try:
            with self._lock:
                self._socket.sendall(b"".join(frames))
        except OSError as error:
            raise DisconnectedError(f"the control plane has gone: {error}") from None

    def receive(self, timeout_s: float | None, *wakers: HasFileno) -> Sequence[messages.ToWorker]:
        """What came; waits up to `timeout_s` (None: until something comes) for the first message, or for a waker."""
        if self._early:
            early, self._early = self._early, []
            return early
        readable, _, _ = select.select([self._socket, *wakers], [], [], timeout_s)
        return self._read_once() if self._socket in readable else ()

    def _read_some(self, timeout_s: float) -> list[messages.ToWorker]:
        """At least one message; raises if none comes in time."""
        while True:
            readable, _, _ = select.select([self._socket], [], [], timeout_s)
            if not readable:
                raise UnavailableError("the control plane did not answer the hello")
            if got := self._read_once():
                return got

    def _read_once(self) -> list[messages.ToWorker]:
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise DisconnectedError(f"the control plane has gone: {error}") from None
        if not data:
            raise DisconnectedError("the control plane closed the connection")
        got: list[messages.ToWorker] = []
        for frame in self._decoder.feed(data):
            if frame.kind is not FrameKind.CONTROL:
                raise FrameError(f"a worker takes no {frame.kind.name} frames")
            got.append(messages.decode_to_worker(frame.body))
        return got

    def _beat(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self.send(messages.encode(messages.Heartbeat(self._gauges())))
            except DisconnectedError:
                if not self._closed.is_set():
                    # The main thread may be hours into an operation that nobody waits for.
                    logger.warning("leaving: the control plane has gone")
                    os._exit(EXIT_ORPHANED)
