"""An HTTP proxy that reaches only the operator's allowed addresses.

It serves `CONNECT` and plain HTTP. It resolves names itself and connects to the address that it
checked: whatever DNS says, an allowed name never leads to loopback or link-local addresses (such as
a cloud's metadata service). An operator who wants such an address lists it literally. A forwarded
request names the allowed host, whatever its own `Host` says: servers of several sites go by it.
"""

import contextlib
import ipaddress
import select
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from slackwater.model.endpoint import Endpoint
from slackwater.model.errors import ConfigError, RefusedError

MAX_CONNECTIONS = 64  # of one environment
_MAX_HEAD_BYTES = 16 << 10
_HEAD_WITHIN_S = 30.0
_CONNECT_WITHIN_S = 15.0
_MAX_IDLE_S = 300.0
_PIECE_BYTES = 1 << 16
_REPLACED = (b"host", b"proxy-connection", b"proxy-authorization", b"connection", b"keep-alive")


class _Request(NamedTuple):
    endpoint: Endpoint
    forwarded: bytes | None  # the request as the server gets it; None for a tunnel


class EgressProxy:
    """Serves each connection in its own thread."""

    def __init__(self, allowed: Iterable[Endpoint]) -> None:
        self._allowed = frozenset(allowed)

    def serve(self, listener: socket.socket) -> None:
        """Accept connections, up to a limit at once, until the listener is closed."""
        slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        while True:
            slots.acquire()
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._handle, args=(connection, slots), daemon=True).start()

    def _handle(self, client: socket.socket, slots: threading.BoundedSemaphore) -> None:
        try:
            with client, contextlib.suppress(OSError):
                try:
                    self._serve_request(client)
                except ConfigError as error:
                    _send_error(client, "400 Bad Request", str(error))
                except RefusedError as error:
                    _send_error(client, "403 Forbidden", str(error))
        finally:
            slots.release()

    def _serve_request(self, client: socket.socket) -> None:
        client.settimeout(_HEAD_WITHIN_S)
        head, rest = _read_head(client)
        request = _parse(head)
        if request.endpoint not in self._allowed:
            host, port = request.endpoint
            raise RefusedError(f"{host}:{port} is not an address that the operator allows")
        try:
            server = _connect(request.endpoint)
        except OSError as error:
            _send_error(client, "502 Bad Gateway", f"{request.endpoint.host}: {error}")
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
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > _MAX_HEAD_BYTES:
            raise ConfigError.of("request", len(data), f"must have at most {_MAX_HEAD_BYTES} bytes")
        piece = client.recv(_PIECE_BYTES)
        if not piece:
            raise OSError("the client disconnected")
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _parse(head: bytes) -> _Request:
    line, *headers = head.split(b"\r\n")
    words = line.decode("latin-1").split(" ")
    if len(words) != 3 or len(line.splitlines()) != 1:
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
    own = [f"{method} {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
    lines = [each.encode("latin-1") for each in own]
    return _Request(endpoint, b"\r\n".join([*lines, *_filter_headers(headers), b"", b""]))


def _filter_headers(headers: Iterable[bytes]) -> Iterator[bytes]:
    """The headers that the server gets; a line that servers read differently is refused."""
    for header in headers:
        name, colon, _ = header.partition(b":")
        if not colon or name != name.strip() or b"\n" in header or b"\r" in header:
            raise ConfigError.of("header", header[:40], "must be NAME: VALUE on one line")
        if name.lower() not in _REPLACED:
            yield header


def _connect(endpoint: Endpoint) -> socket.socket:
    """Connect to the first allowed address of the host that answers."""
    host, port = endpoint
    fault = OSError("its name resolves to no address that may be reached")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host.encode(), port, type=socket.SOCK_STREAM
    ):
        if not _is_allowed_address(host, str(address[0])):
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


def _is_allowed_address(host: str, address: str) -> bool:
    """Whether the host, a name or an address, may resolve to that address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host) == parsed
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    is_local = parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified
    return not (is_local or parsed.is_multicast or parsed.is_reserved)


def _relay(client: socket.socket, server: socket.socket) -> None:
    """Relay in both directions until both are closed or idle."""
    other = {client: server, server: client}
    for sender in other:
        sender.settimeout(_MAX_IDLE_S)
    senders = [client, server]
    while senders:
        readable, _, _ = select.select(senders, [], [], _MAX_IDLE_S)
        if not readable:
            return
        for sender in readable:
            if piece := sender.recv(_PIECE_BYTES):
                other[sender].sendall(piece)
            else:
                senders.remove(sender)
                other[sender].shutdown(socket.SHUT_WR)


def _send_error(client: socket.socket, status: str, why: str) -> None:
    body = f"slackwater: {why}\n".encode(errors="replace")
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    client.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
