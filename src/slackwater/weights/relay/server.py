"""A relay server with a thread per connection, so that slow receivers delay no others."""

import logging
import socket
import threading
from contextlib import suppress
from typing import assert_never

from slackwater.model.errors import RefusedError, SlackwaterError, UnavailableError
from slackwater.weights.relay import protocol
from slackwater.weights.relay.bucket_store import BucketStore
from slackwater.weights.relay.peers import RelayOffers
from slackwater.wire.framed_socket import receive_into
from slackwater.wire.proof import prove_as_server

logger = logging.getLogger(__name__)

_STALL_S = 60.0  # how long a peer may take no byte before its connection is closed
_PIECE = 1 << 20
_MOST_CONNECTIONS, _MOST_STRANGERS = 256, 32


class RelayServer:
    """Listens from construction on; `close` ends all connections. `host` must be reachable."""

    def __init__(
        self,
        store: BucketStore,
        secret: bytes | RelayOffers,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        node: str = "",
        patience_s: float = 0.0,
    ) -> None:
        """Serves clients that prove the secret, or with `RelayOffers` other nodes.

        `patience_s`: how long to wait for a payload that was not announced.
        """
        self.store = store
        self._secret, self._node = secret, node
        self._patience_s = patience_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._open: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}  # not yet authenticated, oldest first
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
                full = len(self._open) >= _MOST_CONNECTIONS or self._closed
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
                if self._closed:  # `close` ran while the connection was in neither list
                    return
            else:
                prove_as_server(connection, self._secret, protocol.PURPOSE)
            with self._lock:
                self._strangers.pop(connection, None)
            while not self._closed:
                protocol.limit_silence(connection, None)
                request = protocol.receive_request(connection)
                protocol.limit_silence(connection, _STALL_S)
                if request is None:
                    return
                self._answer(connection, request, peer)
        except (OSError, SlackwaterError) as error:
            logger.debug("connection ended: %s", error)
        finally:
            self.store.release(connection)
            with self._lock:
                self._open.discard(connection)
                self._strangers.pop(connection, None)
            connection.close()

    def _check(self, peer: str, request: protocol.Request) -> None:
        """Refuse another node's request unless it reads a payload that it was offered."""
        assert isinstance(self._secret, RelayOffers)
        match request:
            case protocol.GetManifest(version):
                self._secret.check(peer, version, None)
            case protocol.GetBucket(key):
                self._secret.check(peer, key.payload.version, key.payload.base)
            case _:
                raise RefusedError(f"{type(request).__name__}: another node may not do that here")

    def _answer(self, connection: socket.socket, request: protocol.Request, peer: str) -> None:
        """Execute a request and reply; an error within raw bytes ends the connection instead."""
        try:
            if peer:
                self._check(peer, request)
            if isinstance(request, protocol.GetBucket):
                self._get(connection, request)
            elif isinstance(request, protocol.PutBucket):
                self._put(connection, request)
            elif isinstance(request, protocol.ConfirmRead):
                protocol.send(connection, protocol.Success())
            else:
                protocol.send(connection, protocol.Success(self._execute(request)))
        except SlackwaterError as error:
            protocol.send(connection, protocol.Failure(type(error).__name__, str(error)))

    def _execute(
        self,
        request: protocol.SealVersion
        | protocol.ListVersions
        | protocol.GetManifest
        | protocol.DropRelayVersion,
    ) -> object:
        store = self.store
        match request:
            case protocol.SealVersion(manifest):
                store.seal(manifest)
            case protocol.ListVersions():
                return [
                    protocol.VersionListing(m.version, {base: m.bytes_of(base) for base in m.sizes})
                    for m in store.manifests()
                ]
            case protocol.GetManifest(version, wait_s):
                return store.manifest(version, min(wait_s, _STALL_S / 2))
            case protocol.DropRelayVersion(payload):
                store.drop(payload)
            case _:
                assert_never(request)
        return None

    def _put(self, connection: socket.socket, request: protocol.PutBucket) -> None:
        slot = self.store.begin_write(
            request.key, request.size, request.tag, _STALL_S / 2, owner=connection
        )
        protocol.send(connection, protocol.Success(None if slot is None else slot.filled))
        if slot is None:
            return
        try:
            filled = slot.filled
            while filled < slot.size:
                for piece in slot.pieces(filled, filled + _PIECE):
                    receive_into(connection, piece)
                    filled += len(piece)
                self.store.advance(slot, filled)
        except SlackwaterError as error:
            raise ConnectionAbortedError(str(error)) from None
        finally:
            self.store.fail(slot)
        protocol.send(connection, protocol.Success())

    def _get(self, connection: socket.socket, request: protocol.GetBucket) -> None:
        slot = self.store.open(request.key, _STALL_S, self._patience_s)
        try:
            if request.node and request.node == self._node and slot.path:
                self.store.wait(slot, slot.size - 1, _STALL_S)
                protocol.send(connection, protocol.Success((slot.size, slot.path)))
                # The slot stays open until the peer sends `ConfirmRead`: its descriptor's number
                # must not be reused for another bucket meanwhile.
                protocol.receive_request(connection)
                protocol.send(connection, protocol.Success())
                return
            protocol.send(connection, protocol.Success((slot.size, "")))
            sent = request.offset
            while sent < slot.size:
                filled = self.store.wait(slot, sent, _STALL_S)
                for piece in slot.pieces(sent, filled):
                    connection.sendall(piece)
                sent = filled
        except UnavailableError as error:
            raise ConnectionAbortedError(str(error)) from None
        finally:
            self.store.close(slot)
