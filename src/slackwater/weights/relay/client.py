"""One authenticated connection to a relay; blocking, for one thread."""

import mmap
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from slackwater.model.errors import SlackwaterError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.weights.relay import protocol
from slackwater.weights.relay.bucket_store import BucketKey
from slackwater.weights.relay.manifest import Manifest
from slackwater.weights.relay.peers import RelayPeer
from slackwater.wire.framed_socket import receive_into
from slackwater.wire.proof import prove_as_client

_PIECE = 1 << 19
_COPY = 4 << 20
Address = tuple[str, int]


class RelayClient:
    """Requests to one relay. After an UnavailableError the connection is unusable; open another."""

    def __init__(
        self,
        address: Address,
        secret: bytes | RelayPeer,
        timeout_s: float = 60.0,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect with this node's secret, or to another node's relay as a `RelayPeer`."""
        self._socket: socket.socket
        if isinstance(secret, RelayPeer):
            self._socket = secret.dial(address, timeout_s, is_cancelled)
            protocol.limit_silence(self._socket, timeout_s)
            return
        try:
            self._socket = socket.create_connection(address, timeout=timeout_s)
        except OSError as error:
            raise UnavailableError(f"relay {address[0]}:{address[1]}: {error}") from None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            protocol.limit_silence(self._socket, timeout_s)
            prove_as_client(self._socket, secret, protocol.PURPOSE)
        except (OSError, SlackwaterError) as error:
            self._socket.close()
            raise _transient(error) from None

    def __enter__(self) -> "RelayClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, and wake a thread that waits on it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def versions(self) -> list[protocol.VersionListing]:
        """The visible versions, oldest first, with the bytes of their payloads."""
        return msgspec.convert(self._ask(protocol.ListVersions()), list[protocol.VersionListing])

    def manifest(self, version: str, wait_s: float = 0.0) -> Manifest:
        """A visible version's manifest; waits for it if asked to."""
        manifest = msgspec.convert(self._ask(protocol.GetManifest(version, wait_s)), Manifest)
        manifest.check()
        return manifest

    def put(self, key: BucketKey, size: int, tag: int, views: Sequence[memoryview]) -> None:
        """Send a bucket, resuming an earlier try; a no-op if the relay has it."""
        try:
            protocol.send(self._socket, protocol.PutBucket(key, size, tag))
            start = protocol.receive_reply(self._socket)
            if start is not None:
                protocol.send_views(self._socket, views, int(start))
                protocol.receive_reply(self._socket)
        except OSError as error:
            raise _transient(error) from None

    def seal(self, manifest: Manifest) -> None:
        self._ask(protocol.SealVersion(manifest))

    def drop(self, payload: Payload) -> None:
        self._ask(protocol.DropRelayVersion(payload))

    def get(
        self,
        key: BucketKey,
        views: Sequence[memoryview],
        *,
        offset: int = 0,
        node: str = "",
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Receive a bucket into memory from `offset` on; `on_progress` gets the bytes so far."""
        size = sum(map(len, views))
        try:
            protocol.send(self._socket, protocol.GetBucket(key, offset, node))
            there, path = msgspec.convert(protocol.receive_reply(self._socket), tuple[int, str])
            if there != size:
                raise UnavailableError(f"a bucket of {there} bytes came, not of {size}")
            if not path:
                self._receive(views, offset, on_progress)
                return
            try:
                read = _copy_shared(Path(path), size, views)
            finally:
                protocol.send(self._socket, protocol.ConfirmRead())
                protocol.receive_reply(self._socket)
            if read:
                on_progress(size)
                return
        except (OSError, msgspec.ValidationError) as error:
            raise _transient(error) from None
        # This process may not open the relay's memory: receive over the socket instead.
        self.get(key, views, offset=offset, on_progress=on_progress)

    def _receive(
        self, views: Sequence[memoryview], offset: int, on_progress: Callable[[int], None]
    ) -> None:
        base = 0
        for view in views:
            start = max(offset - base, 0)
            for at in range(start, len(view), _PIECE):
                piece = view[at : at + _PIECE]
                receive_into(self._socket, piece)
                on_progress(base + at + len(piece))
            base += len(view)

    def _ask(self, request: protocol.Request) -> object:
        try:
            protocol.send(self._socket, request)
            answer: object = protocol.receive_reply(self._socket)
        except OSError as error:
            raise _transient(error) from None
        return answer


def _copy_shared(path: Path, size: int, views: Sequence[memoryview]) -> bool:
    """Copy a bucket from this node's shared memory; False if this process may not open it."""
    try:
        file = path.open("rb")
    except OSError:
        return False
    with file:
        if os.fstat(file.fileno()).st_size != size:
            raise UnavailableError(f"shared bucket {path.name} is not of {size} bytes")
        with (
            mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as shared,
            memoryview(shared) as whole,
        ):
            at = 0
            for view in views:
                copy_in_pieces(whole[at : at + len(view)], view)
                at += len(view)
    return True


def copy_in_pieces(source: memoryview, target: memoryview) -> None:
    """Copy memory so that other threads of this process run meanwhile."""
    import numpy as np

    here, there = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    for at in range(0, len(here), _COPY):
        np.copyto(there[at : at + _COPY], here[at : at + _COPY])


def _transient(error: Exception) -> SlackwaterError:
    """The error as one that means: try again, or another source."""
    if isinstance(error, SlackwaterError):
        return error
    return UnavailableError(f"the connection to the relay broke: {error or type(error).__name__}")
