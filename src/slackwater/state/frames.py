"""Messages with file descriptors over a Unix socket: a length with the descriptors, the message."""

import contextlib
import os
import socket
import struct
import threading
from typing import TypeVar

import msgspec

from slackwater.model.errors import SlackwaterError, UnavailableError
from slackwater.wire.framed_socket import LENGTH, receive_body

_MOST_DESCRIPTORS = 64
_LONGEST = 256 << 20

M = TypeVar("M")


def socket_address(path: str) -> str:
    """`@NAME` is in Linux's abstract namespace, and ends with its process; others are files."""
    return f"\0{path[1:]}" if path.startswith("@") else path


class Frames:
    """One end of a connection. Sending is safe from any thread; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, message: object, descriptors: list[int] | None = None) -> None:
        """UnavailableError when the other end has gone."""
        data = msgspec.msgpack.encode(message)
        try:
            with self._sending:
                socket.send_fds(self._socket, [LENGTH.pack(len(data))], descriptors or [])
                self._socket.sendall(data)
        except OSError as error:
            raise UnavailableError(f"state: the other end has gone: {error}") from error

    def receive(self, decoder: "msgspec.msgpack.Decoder[M]") -> tuple[M, list[int]] | None:
        """The next message and its descriptors; None at the end."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, LENGTH.size, _MOST_DESCRIPTORS)
            if not head:
                return None
            return decoder.decode(receive_body(self._socket, head, _LONGEST)), descriptors
        except (OSError, struct.error, SlackwaterError, msgspec.MsgspecError):
            return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
