"""The relay protocol: a handshake that proves the fleet's secret, then requests.

Each message is a 32-bit length and MessagePack; a bucket's raw bytes follow their message.
"""

import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from slackwater.model.errors import (
    ConfigError,
    NotFoundError,
    RefusedError,
    SlackwaterError,
    UnavailableError,
)
from slackwater.model.payload import Payload
from slackwater.weights.relay.bucket_store import BucketKey
from slackwater.weights.relay.manifest import Manifest
from slackwater.wire.framed_socket import receive_message, send_message

PURPOSE = b"weights 1"  # of a handshake
_TIMEVAL = struct.Struct("@ll")
_ERRORS: dict[str, type[SlackwaterError]] = {
    kind.__name__: kind for kind in (ConfigError, NotFoundError, RefusedError, UnavailableError)
}


Count = Annotated[int, msgspec.Meta(ge=0)]


class PutBucket(msgspec.Struct, frozen=True, tag=True):
    """Store a bucket: its bytes follow from the offset in the reply, or none if that is None."""

    key: BucketKey
    size: Count
    tag: Count


class SealVersion(msgspec.Struct, frozen=True, tag=True):
    """Make a version visible whose buckets are all stored."""

    manifest: Manifest


class ListVersions(msgspec.Struct, frozen=True, tag=True):
    """List the visible versions and the sizes of their payloads."""


class GetManifest(msgspec.Struct, frozen=True, tag=True):
    """Get a version's manifest, once it is visible."""

    version: str
    wait_s: float = 0.0


class GetBucket(msgspec.Struct, frozen=True, tag=True):
    """Get a bucket's bytes from `offset` on, or its path if `node` is the server's."""

    key: BucketKey
    offset: Count = 0
    node: str = ""


class ConfirmRead(msgspec.Struct, frozen=True, tag=True):
    """The client has read the shared memory, or could not: the slot may be closed."""


class DropRelayVersion(msgspec.Struct, frozen=True, tag=True):
    """Drop a payload."""

    payload: Payload


Request = (
    PutBucket
    | SealVersion
    | ListVersions
    | GetManifest
    | GetBucket
    | ConfirmRead
    | DropRelayVersion
)


class VersionListing(msgspec.Struct, frozen=True, array_like=True):
    """A visible version, with the bytes of its payloads by base."""

    version: str
    sizes: dict[str, int]


class Success(msgspec.Struct, frozen=True, tag=True):
    """Success, with the result if any."""

    value: Any = None


class Failure(msgspec.Struct, frozen=True, tag=True):
    """An error: its class and its message."""

    kind: str
    said: str

    def error(self) -> SlackwaterError:
        return _ERRORS.get(self.kind, UnavailableError)(self.said)


Reply = Success | Failure
_decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
_encode = msgspec.msgpack.Encoder().encode


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    send_message(connection, _encode(message))


def receive_request(connection: socket.socket) -> Request | None:
    """The next request; None if the peer is gone."""
    body = receive_message(connection)
    if body is None:
        return None
    try:
        request: Request = _decode_request(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError.of("request", len(body), f"bytes are no request: {error}") from None
    return request


def receive_reply(connection: socket.socket) -> Any:
    """The value of the next reply, or its error raised."""
    body = receive_message(connection)
    if body is None:
        raise UnavailableError("the relay closed the connection")
    reply = decode_reply(body)
    if isinstance(reply, Failure):
        raise reply.error()
    return reply.value


def limit_silence(connection: socket.socket, silent_s: float | None) -> None:
    """Limit a peer's silence (None: no limit) by socket option: a large read stays one call."""
    if isinstance(connection, ssl.SSLSocket):  # it reads in small pieces anyway
        connection.settimeout(silent_s)
        return
    connection.settimeout(None)
    whole = 0 if silent_s is None else int(silent_s)
    parts = 0 if silent_s is None else int((silent_s - whole) * 1e6)
    for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, side, _TIMEVAL.pack(whole, parts))


def send_views(connection: socket.socket, views: Sequence[memoryview], offset: int = 0) -> None:
    """Send memory without copying, after the first `offset` bytes."""
    for view in views:
        if offset < len(view):
            connection.sendall(view[offset:])
        offset = max(offset - len(view), 0)
