"""Bytes and descriptors from one process to another over a socket."""

import array
import fcntl
import os
import socket

from slackwater.model.errors import UnavailableError

_MOST = 16
_BEYOND_FIXED = 64  # below this, descriptors of a program that is started have fixed numbers
_BYTES = array.array("i").itemsize


def received(ends: socket.socket, length: int) -> tuple[bytes, list[int]]:
    """Bytes and close-on-exec descriptors, which `socket.recv_fds` cannot request."""
    room = socket.CMSG_SPACE(_MOST * _BYTES)
    body, beside, _, _ = ends.recvmsg(length, room, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, data in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _BYTES])
    return body, found.tolist()


def whole(ends: socket.socket, length: int) -> bytes:
    """So many bytes; UnavailableError if the other process has gone before."""
    body = bytearray(length)
    left = memoryview(body)
    while left:
        count = ends.recv_into(left)
        if not count:
            raise UnavailableError("the process at the other end has gone")
        left = left[count:]
    return bytes(body)


def moved_up(descriptor: int) -> int:
    """Close it, and have it under a number that no program's fixed descriptors take."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _BEYOND_FIXED)
    finally:
        os.close(descriptor)


def readable(content: bytes) -> int:
    """A descriptor from which exactly this can be read; it has no name."""
    made = os.memfd_create("input", os.MFD_CLOEXEC)
    with os.fdopen(made, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(made, 0, os.SEEK_SET)
    return moved_up(made)
