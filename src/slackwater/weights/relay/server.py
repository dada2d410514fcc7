"""A relay: serves the buckets on its shelf, each connection in a thread of its own, so a slow receiver slows nobody."""

import logging
import socket
import threading
from contextlib import suppress
from typing import assert_never

from slackwater.model.errors import (
    ConfigError,
    NotFoundError,
    SlackwaterError,
    UnavailableError,
)
from slackwater.weights.relay import protocol as say
from slackwater.weights.relay.shelf import Shelf
from slackwater.weights.relay.tracker import Tracker

logger = logging.getLogger(__name__)

_STALL_S = 60.0  # how long a peer may take no byte before its connection is closed
_PIECE = 1 << 20


class RelayServer:
    """Listens from construction on; `close` ends every connection. `host` must be reachable by the members."""

    def __init__(
        self,
        shelf: Shelf,
        secret: bytes,
        tracker: Tracker | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        node: str = "",
        member: str = "",
        max_connections: int = 256,
        patience_s: float = 0.0,
    ) -> None:
        """`patience_s`: how long somebody waits here for a cargo that nobody has said is coming."""
        self.shelf = shelf
        self._secret, self._tracker, self._node = secret, tracker, node
        self._member = member
        self._patience_s = patience_s
        self._listener = socket.create_server((host, port), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._max = max_connections
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="weight relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; what is on the shelf stays there."""
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
            if full:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        joined: say.Join | None = None
        try:
            say.limit_silence(connection, _STALL_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            say.prove_as_server(connection, self._secret)
            while not self._closed:
                say.limit_silence(connection, None)
                request = say.receive_request(connection)
                say.limit_silence(connection, _STALL_S)
                if request is None:
                    return
                if isinstance(request, say.Join):
                    joined = request
                self._answer(connection, request)
        except (OSError, SlackwaterError) as error:
            logger.debug("connection ended: %s", error)
        finally:
            if joined is not None and self._tracker is not None:
                self._tracker.leave(joined.member, joined)
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, request: say.Request) -> None:
        """Do what is asked. An error of the request is told; one in the middle of bytes ends the connection."""
        try:
            if isinstance(request, say.Get):
                self._get(connection, request)
            elif isinstance(request, say.GetRanges):
                self._get_ranges(connection, request)
            elif isinstance(request, say.Put):
                self._put(connection, request)
            elif isinstance(request, say.Read):
                say.send(connection, say.Ok())
            else:
                say.send(connection, say.Ok(self._done(request)))
        except SlackwaterError as error:
            say.send(connection, say.Failed(type(error).__name__, str(error)))

    def _done(
        self,
        request: say.Filled
        | say.Seal
        | say.Versions
        | say.About
        | say.Drop
        | say.Join
        | say.Source
        | say.Have,
    ) -> object:
        shelf, tracker = self.shelf, self._tracker
        match request:
            case say.Filled(keys):
                return shelf.filled(keys)
            case say.Seal(manifest):
                shelf.seal(manifest)
            case say.Versions():
                return [
                    say.Line(m.version, {base: m.bytes_of(base) for base in m.sizes})
                    for m in shelf.manifests()
                ]
            case say.About(version, wait_s):
                return shelf.manifest(version, min(wait_s, _STALL_S / 2))
            case say.Drop(cargo):
                shelf.drop(cargo)
                if tracker is not None:
                    tracker.forget(cargo)
            case say.Join():
                if tracker is not None:
                    tracker.join(request)
            case say.Source(member, cargo, lost):
                return (
                    say.From("", "", 0) if tracker is None else tracker.source(member, cargo, lost)
                )
            case say.Have(member, cargoes):
                if tracker is not None:
                    tracker.have(member, cargoes)
            case _:
                assert_never(request)
        return None

    def _put(self, connection: socket.socket, request: say.Put) -> None:
        slot = self.shelf.begin(request.key, request.size, request.tag, _STALL_S / 2)
        say.send(connection, say.Ok(None if slot is None else slot.filled))
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
        say.send(connection, say.Ok())

    def _get(self, connection: socket.socket, request: say.Get) -> None:
        if request.member != self._member:
            raise NotFoundError(f"member {request.member!r} is not here any more")
        slot = self.shelf.open(request.key, _STALL_S, self._patience_s)
        try:
            if request.node and request.node == self._node and slot.path:
                self.shelf.wait(slot, slot.size - 1, _STALL_S)
                say.send(connection, say.Ok((slot.size, slot.path)))
                # Until the peer says `Read` the slot stays open: its descriptor's number must not pass to another.
                say.receive_request(connection)
                say.send(connection, say.Ok())
                return
            say.send(connection, say.Ok((slot.size, "")))
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

    def _get_ranges(self, connection: socket.socket, request: say.GetRanges) -> None:
        slot = self.shelf.open(request.key, _STALL_S, self._patience_s)
        try:
            furthest = max((stop for _, stop in request.ranges), default=0)
            if furthest > slot.size or any(start > stop for start, stop in request.ranges):
                raise ConfigError.of("ranges", furthest, f"must lie in {slot.size} bytes")
            if furthest:
                self.shelf.wait(slot, furthest - 1, _STALL_S)
            size = sum(stop - start for start, stop in request.ranges)
            say.send(connection, say.Ok(size))
            waiting: list[memoryview] = []
            held = 0
            for start, stop in request.ranges:
                waiting += slot.pieces(start, stop)
                held += stop - start
                if held >= _PIECE:
                    connection.sendall(b"".join(waiting))
                    waiting, held = [], 0
            connection.sendall(b"".join(waiting))
        finally:
            self.shelf.close(slot)
