"""A worker's blocking connection to the control plane, with a heartbeat, encrypted by pin.

When the connection ends, a worker redials during its grace period. It exits if it has none, or if
its current operation must not outlive the control plane (`may_outlive`).
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
from slackwater.wire.proof import new_nonce, peer_proof, plane_proof, wrap_pinned

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
_HELLO_TIMEOUT_S = 20.0
TRIM_EVERY_S = 30.0
_REDIAL_S = 0.25
_POLL_S = 0.1  # for a new connection
EXIT_ORPHANED = 3


class HasFileno(Protocol):
    """A descriptor that `select` can wait for."""

    def fileno(self) -> int: ...


class DisconnectedError(UnavailableError):
    """The control plane is lost."""


class RefusedByPlaneError(UnavailableError):
    """The control plane refused this worker; `again`: a later attempt may succeed."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(f"the control plane refused this worker: {reason}")
        self.again = again


def _leave_at_once() -> None:
    """Exit without the main thread: it may be hours into an operation that is not needed now."""
    logger.warning("leaving: the control plane has gone")
    os._exit(EXIT_ORPHANED)


def shake_hands(
    peer: socket.socket, hello: messages.Hello, key: str, decoder: FrameDecoder
) -> messages.Welcome:
    """Prove to each other that both know the worker's key, which is never sent; then say hello."""
    worker, secret, nonce = hello.worker, key.encode(), new_nonce()
    pool = hello.node.pool or "" if hello.node is not None else ""
    peer.sendall(messages.encode(messages.ConnectRequest(worker, nonce, pool=pool)))
    challenge = _receive_message(peer, decoder)
    if not isinstance(challenge, messages.Challenge):
        raise UnavailableError(f"the control plane answered with {type(challenge).__name__}")
    nonces = nonce + challenge.nonce
    proof = peer_proof(secret, worker, nonces)
    peer.sendall(messages.encode(messages.ChallengeResponse(proof)))
    welcome = _receive_message(peer, decoder)
    if not isinstance(welcome, messages.Welcome):
        raise UnavailableError(f"the control plane answered with {type(welcome).__name__}")
    if not hmac.compare_digest(welcome.proof, plane_proof(secret, worker, nonces)):
        raise UnavailableError("the peer does not know this worker's key")
    peer.sendall(messages.encode(hello))
    return welcome


def _receive_message(peer: socket.socket, decoder: FrameDecoder) -> messages.ToWorker:
    """The control plane's next message; before the hello there is one at a time."""
    received: list[messages.ToWorker] = []
    while not received:
        try:
            data = peer.recv(_READ_BYTES)
        except TimeoutError:
            raise UnavailableError("the control plane did not answer in time") from None
        if not data:
            raise DisconnectedError("the control plane closed the connection")
        received = _decode(decoder, data)
    return received[0]


def _decode(decoder: FrameDecoder, data: bytes) -> list[messages.ToWorker]:
    received: list[messages.ToWorker] = []
    for frame in decoder.feed(data):
        if frame.kind is not FrameKind.CONTROL:
            raise FrameError(f"a worker takes no {frame.kind.name} frames")
        message = messages.decode_to_worker(frame.body)
        # A refusal comes during the handshake or right after the hello.
        if isinstance(message, messages.HelloRefused):
            raise RefusedByPlaneError(message.reason, message.again)
        received.append(message)
    return received


class Connection:
    """Receives messages, sends frames; `send` may be called from the heartbeat's thread too.

    With a `pin` the connection is encrypted and only a control plane with that certificate is
    accepted. `on_orphaned` is called from the heartbeat's thread when the control plane is lost for
    longer than `grace_s`.

    While it is lost, nothing is received, and what is sent is dropped, since it would answer a
    control plane that is gone. A new connection is used from the next `receive` on, after
    `on_adopted`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hello: messages.Hello,
        key: str,
        *,
        pin: str | None = None,
        on_orphaned: Callable[[], None] = _leave_at_once,
        grace_s: float = 0.0,
    ) -> None:
        self.name = hello.worker
        self._on_orphaned = on_orphaned
        self._grace_s = grace_s
        self._dial = partial(_open_connection, address, hello, key, pin)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._wake = threading.Event()  # wakes the heartbeat's thread: lost or closed
        self._gauges: Callable[[], dict[str, float]] = dict
        self.may_outlive: Callable[[], bool] = lambda: True
        self.on_adopted: Callable[[], None] = lambda: None
        self.lost = False
        self._replacement: tuple[socket.socket, FrameDecoder] | None = None
        self._reconnections = 0  # later connections that were used
        self._socket, self._decoder, self.heartbeat_every_s = self._dial()

    def __enter__(self) -> "Connection":
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()
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
        if not self.lost:
            try:
                self._write(self._socket, *frames)
            except DisconnectedError:
                if not self._grace_s:
                    raise
                self._mark_lost()

    def _write(self, target: socket.socket, *frames: bytes) -> None:
        try:
            with self._lock:
                target.sendall(b"".join(frames))
        except OSError as error:
            raise DisconnectedError(f"the control plane has gone: {error}") from None

    def receive(self, timeout_s: float | None, *wakers: HasFileno) -> Sequence[messages.ToWorker]:
        """Messages received; waits up to `timeout_s` (None: forever) for one or for a waker."""
        while self.lost and not self._use_replacement():
            left_s = _POLL_S if timeout_s is None else min(timeout_s, _POLL_S)
            if select.select(wakers, [], [], left_s)[0] or timeout_s is not None:
                return ()
        try:
            return self._read_once() if self._wait_readable(timeout_s, wakers) else ()
        except (DisconnectedError, RefusedByPlaneError) as error:
            if not self._grace_s or (
                isinstance(error, RefusedByPlaneError) and not self._reconnections
            ):
                raise
            self._mark_lost()
            return ()

    def _mark_lost(self) -> None:
        self.lost = self._grace_s > 0  # otherwise the next send or receive fails
        self._wake.set()

    def _use_replacement(self) -> bool:
        """Switch to the new connection, if there is one."""
        with self._lock:
            if self._replacement is None:
                return False
            self._socket.close()
            (self._socket, self._decoder), self._replacement = self._replacement, None
            self.lost = False
            self._reconnections += 1
        self.on_adopted()
        return True

    def _wait_readable(self, timeout_s: float | None, wakers: Sequence[HasFileno] = ()) -> bool:
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
        return _decode(self._decoder, data)

    def _receive_bytes(self) -> bytes:
        """Hazard: two threads must not read and write one TLS connection at once."""
        if isinstance(self._socket, ssl.SSLSocket):
            with self._lock:
                return self._socket.recv(_READ_BYTES)
        return self._socket.recv(_READ_BYTES)

    def _send_heartbeats(self) -> None:
        last_trim_s = time.monotonic()
        while not self._closed.is_set():
            self._wake.wait(self.heartbeat_every_s)
            if self._closed.is_set():
                return
            if time.monotonic() - last_trim_s >= TRIM_EVERY_S:
                trim_heap()
                last_trim_s = time.monotonic()
            gauges = {**self._gauges(), MEMORY_GAUGE: resident_bytes()}
            target = self._socket if self._replacement is None else self._replacement[0]
            try:
                if self.lost and self._replacement is None:
                    raise DisconnectedError("the control plane closed the connection")
                self._write(target, messages.encode(messages.Heartbeat(gauges)))
            except DisconnectedError:
                if self._closed.is_set():
                    return
                self._mark_lost()
                with contextlib.suppress(OSError):  # wakes a thread that waits to read
                    target.shutdown(socket.SHUT_RDWR)
                if not self._redial():
                    self._on_orphaned()
                    return

    def _redial(self) -> bool:
        """Reconnect within the grace period; whether that succeeded."""
        if self._grace_s:
            logger.warning("the control plane is lost; dialling again for %g s", self._grace_s)
        deadline_s = time.monotonic() + self._grace_s
        while time.monotonic() < deadline_s and self.may_outlive():
            try:
                peer, decoder, _ = self._dial()
            except (UnavailableError, FrameError) as error:  # refused until the agent is back
                logger.debug("dialling again: %s", error)
                if self._closed.wait(_REDIAL_S):
                    return True
            else:
                with self._lock:
                    self._replacement = (peer, decoder)
                    self._wake.clear()
                return True
        return False


def _open_connection(
    address: tuple[str, int], hello: messages.Hello, key: str, pin: str | None
) -> tuple[socket.socket, FrameDecoder, float]:
    """An accepted connection, its decoder, and the heartbeat interval."""
    try:
        peer = _connect(address, pin)
    except OSError as error:
        endpoint = f"{address[0]}:{address[1]}"
        raise UnavailableError(f"no control plane answers at {endpoint}: {error}") from None
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


def _connect(address: tuple[str, int], pin: str | None) -> socket.socket:
    plain = socket.create_connection(address, timeout=_HELLO_TIMEOUT_S)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return plain if pin is None else wrap_pinned(plain, pin)
