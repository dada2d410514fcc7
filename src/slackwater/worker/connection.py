"""A worker's blocking connection to the control plane, with a heartbeat, encrypted by pin.

A worker never outlives the control plane: when the connection ends it exits, even in the middle of
an operation, because its results would not be kept.
"""

import hmac
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
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
    accepted. `orphaned` is called from the heartbeat's thread when the control plane is lost.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hello: messages.Hello,
        key: str,
        *,
        pin: str | None = None,
        orphaned: Callable[[], None] = _leave_at_once,
    ) -> None:
        self.name = hello.worker
        self._orphaned = orphaned
        try:
            self._socket = _connected(address, pin)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise UnavailableError(f"no control plane answers at {where}: {error}") from None
        self._decoder = FrameDecoder()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._gauges: Callable[[], dict[str, float]] = dict
        try:
            welcome = shake_hands(self._socket, hello, key, self._decoder)
        except OSError as error:
            self._socket.close()
            if isinstance(error, UnavailableError):
                raise
            raise DisconnectedError(f"the control plane has gone: {error}") from None
        self.heartbeat_every_s = welcome.heartbeat_every_s
        self._socket.settimeout(None)

    def __enter__(self) -> "Connection":
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._socket.close()

    def report_gauges(self, gauges: Callable[[], dict[str, float]]) -> None:
        """Gauges for the heartbeat, read from its thread."""
        self._gauges = gauges

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, *frames: bytes) -> None:
        """Send whole frames, together."""
        try:
            with self._lock:
                self._socket.sendall(b"".join(frames))
        except OSError as error:
            raise DisconnectedError(f"the control plane has gone: {error}") from None

    def receive(self, timeout_s: float | None, *wakers: HasFileno) -> Sequence[messages.ToWorker]:
        """Messages received; waits up to `timeout_s` (None: forever) for one or for a waker."""
        return self._read_once() if self._readable(timeout_s, wakers) else ()

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
        while not self._closed.wait(self.heartbeat_every_s):
            if time.monotonic() - trimmed_s >= TRIM_EVERY_S:
                trim_heap()
                trimmed_s = time.monotonic()
            gauges = {**self._gauges(), MEMORY_GAUGE: resident_bytes()}
            try:
                self.send(messages.encode(messages.Heartbeat(gauges)))
            except DisconnectedError:
                if not self._closed.is_set():
                    self._orphaned()
                return


def _connected(address: tuple[str, int], pin: str | None) -> socket.socket:
    plain = socket.create_connection(address, timeout=_HELLO_TIMEOUT_S)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return plain if pin is None else pinned(plain, pin)
