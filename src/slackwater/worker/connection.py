"""A worker's blocking connection to the control plane, with a heartbeat, encrypted by pin.

When the connection ends, a worker with a grace period dials again until that is over; it exits when
it has none, or when it may not be adopted in the middle of what it does.
"""

import contextlib
import hmac
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from slackwater.model.errors import UnavailableError
from slackwater.wire import messages
from slackwater.wire.frames import FrameDecoder, FrameError, FrameKind
from slackwater.wire.memory import MEMORY_GAUGE, resident_bytes, trim_heap
from slackwater.wire.proof import new_nonce, peer_proof, pinned, plane_proof

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
_HELLO_TIMEOUT_S = 20.0
TRIM_EVERY_S = 30.0
_REDIAL_S = 0.25
_LOOK_S = 0.1  # for a new connection
EXIT_ORPHANED = 3


class HasFileno(Protocol):
    """Something that can be waited for."""

    def fileno(self) -> int: ...


class DisconnectedError(UnavailableError):
    """The control plane is lost."""


class RefusedByPlaneError(UnavailableError):
    """The control plane does not want this worker; `again`: it may later."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(f"the control plane refused this worker: {reason}")
        self.again = again


def _leave_at_once() -> None:
    """The main thread may be hours into an operation whose result nobody needs."""
    logger.warning("leaving: the control plane has gone")
    os._exit(EXIT_ORPHANED)


def shake_hands(
    peer: socket.socket, hello: messages.Hello, key: str, decoder: FrameDecoder
) -> messages.Welcome:
    """Prove to each other that both know the worker's key, which is never sent; then say hello."""
    worker, secret, ours = hello.worker, key.encode(), new_nonce()
    pool = hello.node.pool or "" if hello.node is not None else ""
    peer.sendall(messages.encode(messages.ConnectRequest(worker, ours, pool=pool)))
    challenge = _answer(peer, decoder)
    if not isinstance(challenge, messages.Challenge):
        raise UnavailableError(f"the control plane answered with {type(challenge).__name__}")
    nonces = ours + challenge.nonce
    proof = peer_proof(secret, worker, nonces)
    peer.sendall(messages.encode(messages.ChallengeResponse(proof)))
    welcome = _answer(peer, decoder)
    if not isinstance(welcome, messages.Welcome):
        raise UnavailableError(f"the control plane answered with {type(welcome).__name__}")
    if not hmac.compare_digest(welcome.proof, plane_proof(secret, worker, nonces)):
        raise UnavailableError("what answers there does not know this worker's key")
    peer.sendall(messages.encode(hello))
    return welcome


def _answer(peer: socket.socket, decoder: FrameDecoder) -> messages.ToWorker:
    """The control plane's next message; before the hello there is one at a time."""
    got: list[messages.ToWorker] = []
    while not got:
        try:
            data = peer.recv(_READ_BYTES)
        except TimeoutError:
            raise UnavailableError("the control plane did not answer in time") from None
        if not data:
            raise DisconnectedError("the control plane closed the connection")
        got = _decoded(decoder, data)
    return got[0]


def _decoded(decoder: FrameDecoder, data: bytes) -> list[messages.ToWorker]:
    got: list[messages.ToWorker] = []
    for frame in decoder.feed(data):
        if frame.kind is not FrameKind.CONTROL:
            raise FrameError(f"a worker takes no {frame.kind.name} frames")
        message = messages.decode_to_worker(frame.body)
        # at the handshake, or once the hello was read
        if isinstance(message, messages.HelloRefused):
            raise RefusedByPlaneError(message.reason, message.again)
        got.append(message)
    return got


class Connection:
    """Receives messages, sends frames; `send` may be called from the heartbeat's thread too.

    With a `pin` the connection is encrypted and only a control plane with that certificate is
    accepted. `orphaned` is called from the heartbeat's thread when the control plane is lost for
    longer than `grace_s`.

    While it is lost, nothing is received and what is sent is dropped: it answers what a control
    plane asked that is gone. A new connection counts from the next `receive` on, after `returned`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hello: messages.Hello,
        key: str,
        *,
        pin: str | None = None,
        orphaned: Callable[[], None] = _leave_at_once,
        grace_s: float = 0.0,
    ) -> None:
        self.name = hello.worker
        self._orphaned = orphaned
        self._grace_s = grace_s
        self._dial = partial(_opened, address, hello, key, pin)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._wake = threading.Event()  # of the heartbeat's thread: lost, or closed
        self._gauges: Callable[[], dict[str, float]] = dict
        self.may_outlive: Callable[[], bool] = lambda: True
        self.returned: Callable[[], None] = lambda: None
        self.lost = False
        self._next: tuple[socket.socket, FrameDecoder] | None = None
        self._lives = 0  # connections after the first that were used
        self._socket, self._decoder, self.heartbeat_every_s = self._dial()

    def __enter__(self) -> "Connection":
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._wake.set()
        self._socket.close()

    def report_gauges(self, gauges: Callable[[], dict[str, float]]) -> None:
        """Gauges for the heartbeat, read from its thread."""
        self._gauges = gauges

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *frames: bytes) -> None:
        """Send whole frames, together."""
        if not self.lost:
            try:
                self._write(self._socket, *frames)
            except DisconnectedError:
                if not self._grace_s:
                    raise
                self._lose()

    def _write(self, to: socket.socket, *frames: bytes) -> None:
        try:
            with self._lock:
                to.sendall(b"".join(frames))
        except OSError as error:
            raise DisconnectedError(f"the control plane has gone: {error}") from None

    def receive(self, timeout_s: float | None, *wakers: HasFileno) -> Sequence[messages.ToWorker]:
        """Messages received; waits up to `timeout_s` (None: forever) for one or for a waker."""
        while self.lost and not self._switch():
            left_s = _LOOK_S if timeout_s is None else min(timeout_s, _LOOK_S)
            if select.select(wakers, [], [], left_s)[0] or timeout_s is not None:
                return ()
        try:
            return self._read_once() if self._readable(timeout_s, wakers) else ()
        except (DisconnectedError, RefusedByPlaneError) as error:
            if not self._grace_s or (isinstance(error, RefusedByPlaneError) and not self._lives):
                raise
            self._lose()
            return ()

    def _lose(self) -> None:
        self.lost = self._grace_s > 0  # else whoever sends or receives next fails
        self._wake.set()

    def _switch(self) -> bool:
        """Take the next connection into use, if there is one."""
        with self._lock:
            if self._next is None:
                return False
            self._socket.close()
            (self._socket, self._decoder), self._next = self._next, None
            self.lost = False
            self._lives += 1
        self.returned()
        return True

    def _readable(self, timeout_s: float | None, wakers: Sequence[HasFileno] = ()) -> bool:
        """Whether data is ready; TLS may hold decrypted bytes that the socket no longer has."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        readable, _, _ = select.select([self._socket, *wakers], [], [], timeout_s)
        return self._socket in readable

    def _read_once(self) -> list[messages.ToWorker]:
        try:
            data = self._receive_bytes()
        except OSError as error:
            raise DisconnectedError(f"the control plane has gone: {error}") from None
        if not data:
            raise DisconnectedError("the control plane closed the connection")
        return _decoded(self._decoder, data)

    def _receive_bytes(self) -> bytes:
        """Hazard: one encrypted connection may not be read and written by two threads at once."""
        if isinstance(self._socket, ssl.SSLSocket):
            with self._lock:
                return self._socket.recv(_READ_BYTES)
        return self._socket.recv(_READ_BYTES)

    def _beat(self) -> None:
        trimmed_s = time.monotonic()
        while not self._closed.is_set():
            self._wake.wait(self.heartbeat_every_s)
            if self._closed.is_set():
                return
            if time.monotonic() - trimmed_s >= TRIM_EVERY_S:
                trim_heap()
                trimmed_s = time.monotonic()
            gauges = {**self._gauges(), MEMORY_GAUGE: resident_bytes()}
            to = self._socket if self._next is None else self._next[0]
            try:
                if self.lost and self._next is None:
                    raise DisconnectedError("the control plane closed the connection")
                self._write(to, messages.encode(messages.Heartbeat(gauges)))
            except DisconnectedError:
                if self._closed.is_set():
                    return
                self._lose()
                with contextlib.suppress(OSError):  # wakes a thread that waits to read
                    to.shutdown(socket.SHUT_RDWR)
                if not self._redial():
                    self._orphaned()
                    return

    def _redial(self) -> bool:
        """Whether another connection was made within the grace period."""
        if self._grace_s:
            logger.warning("the control plane is lost; dialling again for %g s", self._grace_s)
        deadline_s = time.monotonic() + self._grace_s
        while time.monotonic() < deadline_s and self.may_outlive():
            try:
                made, decoder, _ = self._dial()
            except (UnavailableError, FrameError) as error:  # or refused: the agent is not back yet
                logger.debug("dialling again: %s", error)
                if self._closed.wait(_REDIAL_S):
                    return True
            else:
                with self._lock:
                    self._next = (made, decoder)
                    self._wake.clear()
                return True
        return False


def _opened(
    address: tuple[str, int], hello: messages.Hello, key: str, pin: str | None
) -> tuple[socket.socket, FrameDecoder, float]:
    """A connection that has been welcomed, and how often to send heartbeats."""
    try:
        peer = _connected(address, pin)
    except OSError as error:
        where = f"{address[0]}:{address[1]}"
        raise UnavailableError(f"no control plane answers at {where}: {error}") from None
    decoder = FrameDecoder()
    try:
        welcome = shake_hands(peer, hello, key, decoder)
    except OSError as error:
        peer.close()
        if isinstance(error, UnavailableError):
            raise
        raise DisconnectedError(f"the control plane has gone: {error}") from None
    peer.settimeout(None)
    return peer, decoder, welcome.heartbeat_every_s


def _connected(address: tuple[str, int], pin: str | None) -> socket.socket:
    plain = socket.create_connection(address, timeout=_HELLO_TIMEOUT_S)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return plain if pin is None else pinned(plain, pin)
