"""A relay server with a thread per connection, so that slow receivers delay no others."""

import logging
import socket
import threading
from contextlib import suppress
from typing import assert_never

from slackwater.model.errors import RefusedError, SlackwaterError, UnavailableError
from slackwater.weights.relay import protocol as say
from slackwater.weights.relay.bucket_store import BucketStore
from slackwater.weights.relay.peers import RelayOffers

logger = logging.getLogger(__name__)

_STALL_S = 60.0  # how long a peer may take no byte before its connection is closed
_PIECE = 1 << 20
_MOST_STRANGERS = 32


class RelayServer:
    """Listens from construction on; `close` ends all connections. `host` must be reachable."""

    def __init__(
        self,
        shelf: BucketStore,
        secret: bytes | RelayOffers,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        node: str = "",
        max_connections: int = 256,
        patience_s: float = 0.0,
    ) -> None:
        """Serves those who prove the secret, or with `RelayOffers` other nodes.

        `patience_s`: how long to wait for a payload that nobody has announced.
        """
        self.shelf = shelf
        self._secret, self._node = secret, node
        self._patience_s = patience_s
        self._listener = socket.create_server((host, port), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._max = max_connections
        self._open: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}  # those that have not proved themselves
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="weight relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; the store keeps its buckets."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                full = len(self._open) >= self._max or self._closed
                if not full:
                    self._open.add(connection)
                    self._strangers[connection] = None
                oldest = None
                if len(self._strangers) > _MOST_STRANGERS:
                    oldest = next(iter(self._strangers))
            if full:
                connection.close()
                continue
            if oldest is not None:
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer = ""
            if isinstance(self._secret, RelayOffers):
                plain = connection
                connection, peer = self._secret.admit(plain)
                with self._lock:
                    self._open.discard(plain)
                    self._open.add(connection)
                    self._strangers.pop(plain, None)
                if self._closed:  # while it was not listed
                    return
            else:
                say.prove_as_server(connection, self._secret)
            with self._lock:
                self._strangers.pop(connection, None)
            while not self._closed:
                say.limit_silence(connection, None)
                request = say.receive_request(connection)
                say.limit_silence(connection, _STALL_S)
                if request is None:
                    return
                self._answer(connection, request, peer)
        except (OSError, SlackwaterError) as error:
            logger.debug("connection ended: %s", error)
        finally:
            self.shelf.release(connection)
            with self._lock:
                self._open.discard(connection)
                self._strangers.pop(connection, None)
            connection.close()

    def _check(self, peer: str, request: say.Request) -> None:
        """Another node may only read what it was offered."""
        assert isinstance(self._secret, RelayOffers)
        match request:
            case say.GetManifest(version):
                self._secret.check(peer, version, None)
            case say.GetBucket(key):
                self._secret.check(peer, key.payload.version, key.payload.base)
            case _:
                raise RefusedError(f"{type(request).__name__}: another node may not do that here")

    def _answer(self, connection: socket.socket, request: say.Request, peer: str) -> None:
        """Execute a request; errors are answered, but errors amid raw bytes end the connection."""
        try:
            if peer:
                self._check(peer, request)
            if isinstance(request, say.GetBucket):
                self._get(connection, request)
            elif isinstance(request, say.PutBucket):
                self._put(connection, request)
            elif isinstance(request, say.ConfirmRead):
                say.send(connection, say.Success())
            else:
                say.send(connection, say.Success(self._done(request)))
        except SlackwaterError as error:
            say.send(connection, say.Failure(type(error).__name__, str(error)))

    def _done(
        self,
        request: say.SealVersion | say.ListVersions | say.GetManifest | say.DropRelayVersion,
    ) -> object:
        shelf = self.shelf
        match request:
            case say.SealVersion(manifest):
                shelf.seal(manifest)
            case say.ListVersions():
                return [
                    say.VersionListing(m.version, {base: m.bytes_of(base) for base in m.sizes})
                    for m in shelf.manifests()
                ]
            case say.GetManifest(version, wait_s):
                return shelf.manifest(version, min(wait_s, _STALL_S / 2))
            case say.DropRelayVersion(payload):
                shelf.drop(payload)
            case _:
                assert_never(request)
        return None

    def _put(self, connection: socket.socket, request: say.PutBucket) -> None:
        slot = self.shelf.begin(
            request.key, request.size, request.tag, _STALL_S / 2, owner=connection
        )
        say.send(connection, say.Success(None if slot is None else slot.filled))
        if slot is None:
            return
        try:
            filled = slot.filled
            while filled < slot.size:
                for piece in slot.pieces(filled, filled + _PIECE):
                    say.receive_into(connection, piece)
                    filled += len(piece)
                self.shelf.advance(slot, filled)
        except SlackwaterError as error:
            raise ConnectionAbortedError(str(error)) from None
        finally:
            self.shelf.fail(slot)
        say.send(connection, say.Success())

    def _get(self, connection: socket.socket, request: say.GetBucket) -> None:
        slot = self.shelf.open(request.key, _STALL_S, self._patience_s)
        try:
            if request.node and request.node == self._node and slot.path:
                self.shelf.wait(slot, slot.size - 1, _STALL_S)
                say.send(connection, say.Success((slot.size, slot.path)))
                # Until the peer says `Read` the slot stays open: its descriptor's number must not
                # pass to another.
                say.receive_request(connection)
                say.send(connection, say.Success())
                return
            say.send(connection, say.Success((slot.size, "")))
            sent = request.offset
            while sent < slot.size:
                filled = self.shelf.wait(slot, sent, _STALL_S)
                for piece in slot.pieces(sent, filled):
                    connection.sendall(piece)
                sent = filled
        except UnavailableError as error:
            raise ConnectionAbortedError(str(error)) from None
        finally:
            self.shelf.close(slot)
