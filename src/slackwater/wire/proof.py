"""How processes of a fleet prove themselves to each other: by the fleet's secret, which itself never travels, and by a pinned certificate.

server: 32 random bytes        client: 32 random bytes + HMAC(secret, purpose + "client" + both)        server: HMAC(secret, purpose + "server" + both), or 32 zeros and no more
"""

import hashlib
import hmac
import secrets
import socket
import ssl

from slackwater.model.errors import RefusedError, UnavailableError

_NONCE = 32
_REFUSED = bytes(32)


def prove_as_server(connection: socket.socket, secret: bytes, purpose: bytes) -> None:
    """The server's side; UnavailableError if the client does not know the secret."""
    ours = secrets.token_bytes(_NONCE)
    connection.sendall(ours)
    answer = _receive(connection, _NONCE + 32)
    both = ours + answer[:_NONCE]
    if not hmac.compare_digest(answer[_NONCE:], _proof(secret, purpose + b" client", both)):
        connection.sendall(_REFUSED)
        raise UnavailableError("a client does not know the fleet's secret")
    connection.sendall(_proof(secret, purpose + b" server", both))


def prove_as_client(connection: socket.socket, secret: bytes, purpose: bytes) -> None:
    """The client's side; RefusedError if either does not know the other's secret."""
    both = _receive(connection, _NONCE) + secrets.token_bytes(_NONCE)
    connection.sendall(both[_NONCE:] + _proof(secret, purpose + b" client", both))
    answer = _receive(connection, 32)
    if answer == _REFUSED:
        raise RefusedError("the peer refused this fleet secret; give it the peer's")
    if not hmac.compare_digest(answer, _proof(secret, purpose + b" server", both)):
        raise RefusedError("the peer does not know the fleet's secret; nothing was sent to it")


def pinned(plain: socket.socket, pin: str) -> ssl.SSLSocket:
    """An encrypted connection to the peer whose certificate has this SHA-256; to any other, none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = (
        False  # the certificate itself is compared below, which says more than a name
    )
    context.verify_mode = ssl.CERT_NONE
    encrypted = context.wrap_socket(plain)
    found = hashlib.sha256(encrypted.getpeercert(binary_form=True) or b"").hexdigest()
    if not hmac.compare_digest(found, pin):
        encrypted.close()
        raise UnavailableError(
            f"the peer's certificate is not the fleet's: its SHA-256 begins {found[:16]}, "
            f"expected {pin[:16]}; take a new token with `slackwater node token`"
        )
    return encrypted


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise UnavailableError(f"the peer closed the connection {size - len(data)} bytes early")
        data += piece
    return bytes(data)


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"slackwater " + side + nonces, "sha256")
