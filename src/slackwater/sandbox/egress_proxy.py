"""An HTTP proxy that reaches only the operator's allowed addresses.

It serves `CONNECT` and plain HTTP. It resolves names itself and connects to the address it has
checked: an allowed name never leads to loopback or link-local addresses (such as a cloud's metadata
service), whatever DNS says. An operator who wants such an address lists it literally.
"""

import contextlib
import ipaddress
import select
import socket
import threading
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from slackwater.model.endpoint import Endpoint
from slackwater.model.errors import ConfigError, RefusedError

CONNECTIONS_MOST = 64  # of one environment
_HEAD_MOST = 16 << 10
_HEAD_WITHIN_S = 30.0
_CONNECT_WITHIN_S = 15.0
_IDLE_MOST_S = 300.0
_PIECE = 1 << 16
_HOP_BY_HOP = (b"proxy-connection", b"proxy-authorization", b"connection", b"keep-alive")


class _Request(NamedTuple):
    endpoint: Endpoint
    forwarded: bytes | None  # what the server gets first; None for a tunnel


class EgressProxy:
    """Serves each connection in its own thread."""

    def __init__(self, allowed: Iterable[Endpoint]) -> None:
        self._allowed = frozenset(allowed)

    def serve(self, listener: socket.socket) -> None:
        """Accept connections, up to a limit at once, until the listener is closed."""
        room = threading.BoundedSemaphore(CONNECTIONS_MOST)
        while True:
            room.acquire()
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._handle, args=(connection, room), daemon=True).start()

    def _handle(self, client: socket.socket, room: threading.BoundedSemaphore) -> None:
        try:
            with client, contextlib.suppress(OSError):
                try:
                    self._answer(client)
                except ConfigError as error:
                    _say(client, "400 Bad Request", str(error))
                except RefusedError as error:
                    _say(client, "403 Forbidden", str(error))
        finally:
            room.release()

    def _answer(self, client: socket.socket) -> None:
        client.settimeout(_HEAD_WITHIN_S)
        head, rest = _read_head(client)
        request = _parse(head)
        if request.endpoint not in self._allowed:
            host, port = request.endpoint
            raise RefusedError(f"{host}:{port} is not an address that the operator allows")
        try:
            server = _connect(request.endpoint)
        except OSError as error:
            _say(client, "502 Bad Gateway", f"{request.endpoint.host}: {error}")
            return
        with server:
            if request.forwarded is None:
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                server.sendall(rest)
            else:
                server.sendall(request.forwarded + rest)
            _relay(client, server)


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    """The head of a request and the bytes after it."""
    came = b""
    while b"\r\n\r\n" not in came:
        if len(came) > _HEAD_MOST:
            raise ConfigError.of("request", len(came), f"must have at most {_HEAD_MOST} bytes")
        piece = client.recv(_PIECE)
        if not piece:
            raise OSError("the client has gone")
        came += piece
    head, _, rest = came.partition(b"\r\n\r\n")
    return head, rest


def _parse(head: bytes) -> _Request:
    line, *headers = head.split(b"\r\n")
    words = line.decode("latin-1").split(" ")
    if len(words) != 3:
        raise ConfigError.of("request", words[0][:40], "must be METHOD TARGET VERSION")
    method, target, _ = words
    if method == "CONNECT":
        return _Request(Endpoint.parse("target", target[:300]), None)
    parts = urlsplit(target)
    if parts.scheme != "http" or "@" in parts.netloc:
        raise ConfigError.of("target", target[:300], "must be http://HOST/... or a CONNECT")
    has_port = parts.netloc.rpartition("]")[2].count(":") == 1
    endpoint = Endpoint.parse("target", parts.netloc if has_port else f"{parts.netloc}:80")
    path = parts.path or "/"
    path += f"?{parts.query}" if parts.query else ""
    kept = [each for each in headers if each.partition(b":")[0].strip().lower() not in _HOP_BY_HOP]
    first = f"{method} {path} HTTP/1.1".encode("latin-1")
    return _Request(endpoint, b"\r\n".join([first, *kept, b"Connection: close", b"", b""]))


def _connect(endpoint: Endpoint) -> socket.socket:
    """To the first address that answers, of those that the name may lead to."""
    host, port = endpoint
    fault = OSError("its name leads to no address that may be reached")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host.encode(), port, type=socket.SOCK_STREAM
    ):
        if not _may_lead_to(host, str(address[0])):
            continue
        server = socket.socket(family, kind, protocol)
        server.settimeout(_CONNECT_WITHIN_S)
        try:
            server.connect(address)
        except OSError as error:
            server.close()
            fault = error
            continue
        return server
    raise fault


def _may_lead_to(host: str, address: str) -> bool:
    """Whether the host, a name or an address, may be at that address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host) == found
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    near = found.is_loopback or found.is_link_local or found.is_unspecified
    return not (near or found.is_multicast or found.is_reserved)


def _relay(client: socket.socket, server: socket.socket) -> None:
    """Relay both ways until both are closed or idle."""
    other = {client: server, server: client}
    for end in other:
        end.settimeout(_IDLE_MOST_S)
    speaking = [client, server]
    while speaking:
        readable, _, _ = select.select(speaking, [], [], _IDLE_MOST_S)
        if not readable:
            return
        for end in readable:
            if piece := end.recv(_PIECE):
                other[end].sendall(piece)
            else:
                speaking.remove(end)
                other[end].shutdown(socket.SHUT_WR)


def _say(client: socket.socket, status: str, why: str) -> None:
    body = f"slackwater: {why}\n".encode(errors="replace")
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    client.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
