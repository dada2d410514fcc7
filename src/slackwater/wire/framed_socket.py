"""Messages on a blocking socket: a 32-bit length, then the body."""

import socket
import ssl
import struct

from slackwater.model.errors import ConfigError, UnavailableError

MAX_MESSAGE_BYTES = 64 << 20
LENGTH = struct.Struct("<I")


def send_message(connection: socket.socket, body: bytes) -> None:
    connection.sendall(LENGTH.pack(len(body)) + body)


def receive_message(
    connection: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES
) -> bytearray | None:
    """The next message's body; None if the peer is gone."""
    head = bytearray(LENGTH.size)
    if not receive_into(connection, memoryview(head), at_edge=True):
        return None
    return receive_body(connection, head, max_bytes)


def receive_body(connection: socket.socket, head: bytes | bytearray, max_bytes: int) -> bytearray:
    (length,) = LENGTH.unpack(head)
    if length > max_bytes:
        raise ConfigError.of("message", length, f"bytes are above {max_bytes}")
    body = bytearray(length)
    receive_into(connection, memoryview(body))
    return body


def receive_into(connection: socket.socket, memory: memoryview, *, at_edge: bool = False) -> bool:
    """Fill the memory; False if the peer closed before the first byte and `at_edge`."""
    got, flags = 0, 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    while got < len(memory):
        count = connection.recv_into(memory[got:], 0, flags)
        if count == 0:
            if at_edge and got == 0:
                return False
            raise UnavailableError(
                f"the peer closed the connection {len(memory) - got} bytes early"
            )
        got += count
    return True
