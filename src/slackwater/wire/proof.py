"""Mutual proofs of the fleet's processes: by a key, which is never sent, and by a pinned
certificate.

    server: 32 random bytes
    client: 32 random bytes + HMAC(secret, purpose + "client" + both)
    server: HMAC(secret, purpose + "server" + both), or 32 zeros and no more

At the hub the client sends first, because its name selects the key (`wire/messages.py`).
"""

import hmac
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterable

from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.wire.certificate import peer_fingerprint

NONCE_BYTES = 32
_REFUSED = bytes(32)
_LOOK_EVERY_S = 0.05
STRANGER_S = 10.0  # how long a peer may take for its proof


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def peer_proof(key: bytes, worker: str, nonces: bytes) -> bytes:
    """A worker's or agent's proof to the hub; `nonces` are the worker's and the hub's."""
    return _proof(key, b"hub 4 client " + worker.encode() + b"\0", nonces)


def plane_proof(key: bytes, worker: str, nonces: bytes) -> bytes:
    """The hub's proof to a worker or agent, after the peer's."""
    return _proof(key, b"hub 4 server " + worker.encode() + b"\0", nonces)


def prove_as_server(
    connection: socket.socket, secret: bytes | Callable[[], Iterable[bytes]], purpose: bytes
) -> bytes:
    """The server's side; UnavailableError if the client does not prove the secret in time.

    With several secrets the client proves one, which is returned. A callable is polled until the
    deadline, because the client may learn a new secret slightly before the server. The connection's
    timeout is changed: set it afterwards.
    """
    deadline_s = time.monotonic() + STRANGER_S
    connection.settimeout(STRANGER_S)
    ours = new_nonce()
    connection.sendall(ours)
    answer = _receive(connection, NONCE_BYTES + 32, deadline_s)
    both = ours + answer[:NONCE_BYTES]

    def find_key() -> bytes | None:
        known = secret() if callable(secret) else (secret,)
        for key in known:
            if hmac.compare_digest(answer[NONCE_BYTES:], _proof(key, purpose + b" client", both)):
                return key
        return None

    found = find_key()
    while found is None and callable(secret) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_EVERY_S)
        found = find_key()
    if found is None:
        connection.sendall(_REFUSED)
        raise UnavailableError("a client does not know the secret")
    connection.sendall(_proof(found, purpose + b" server", both))
    return found


def prove_as_client(connection: socket.socket, secret: bytes, purpose: bytes) -> None:
    """The client's side; RefusedError if either does not know the other's secret."""
    both = _receive(connection, NONCE_BYTES) + new_nonce()
    connection.sendall(both[NONCE_BYTES:] + _proof(secret, purpose + b" client", both))
    answer = _receive(connection, 32)
    if answer == _REFUSED:
        raise RefusedError("the peer refused this secret")
    if not hmac.compare_digest(answer, _proof(secret, purpose + b" server", both)):
        raise RefusedError("the peer does not know the secret; nothing was sent to it")


def wrap_pinned(plain: socket.socket, pin: str) -> ssl.SSLSocket:
    """Encrypt a connection; UnavailableError if the peer's certificate has another SHA-256."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate itself is compared below
    context.verify_mode = ssl.CERT_NONE
    encrypted = context.wrap_socket(plain)
    found = peer_fingerprint(encrypted)
    if not hmac.compare_digest(found, pin):
        encrypted.close()
        raise UnavailableError(
            f"the peer's certificate is not the fleet's: its SHA-256 begins {found[:16]}, "
            f"expected {pin[:16]}; take a new token with `slackwater node token`"
        )
    return encrypted


def _receive(connection: socket.socket, size: int, deadline_s: float | None = None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if deadline_s is not None:  # a peer that sends a byte at a time must not pass the deadline
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise UnavailableError("the peer did not prove itself in time")
            connection.settimeout(left_s)
        piece = connection.recv(size - len(data))
        if not piece:
            raise UnavailableError(f"the peer closed the connection {size - len(data)} bytes early")
        data += piece
    return bytes(data)


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"slackwater " + side + nonces, "sha256")
