"""Bytes and descriptors from one process to another over a socket."""

import array
import socket

from slackwater.model.errors import UnavailableError

_MOST = 16
_BYTES = array.array("i").itemsize


def received(ends: socket.socket, length: int) -> tuple[bytes, list[int]]:
    """Bytes, and descriptors that no program which is started inherits (`socket.recv_fds` cannot be asked for such)."""
    room = socket.CMSG_SPACE(_MOST * _BYTES)
    body, beside, _, _ = ends.recvmsg(length, room, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, data in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _BYTES])
    return body, found.tolist()


def whole(ends: socket.socket, length: int) -> bytes:
    """So many bytes; UnavailableError if the other process has gone before."""
    body = b""
    while len(body) < length:
        piece = ends.recv(length - len(body))
        if not piece:
            raise UnavailableError("the process at the other end has gone")
        body += piece
    return body
