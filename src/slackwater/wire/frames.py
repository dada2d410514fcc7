"""Length-prefixed frames: a header of 8 bytes, then the body.

    b"SW"  version u8  kind u8  length u32 (little-endian)  body

The codec is pure: bytes go in, whole frames come out. Garbage, a foreign version, an unknown kind
and a length above the limit raise `FrameError` at the header, before any of the body is buffered.
"""

import struct
from enum import IntEnum
from typing import NamedTuple, TypeVar

import msgspec

from slackwater.model.errors import SlackwaterError

M = TypeVar("M")

MAGIC = b"SW"
VERSION = 1
MAX_FRAME_BYTES = 1 << 30
MAX_STRANGER_FRAME_BYTES = 1 << 16  # from a peer that has not proved its key
_HEADER = struct.Struct("<2sBBI")
HEADER_BYTES = _HEADER.size


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all control messages: a struct tagged with its class name or an explicit `tag`, which
    stays when the class is renamed. Unknown fields are refused.
    """


# What decoding raises for bytes that are no message, however deeply they are nested.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class FrameError(SlackwaterError, ValueError):
    """The peer violates the protocol; the connection must be closed."""


def decode_body(decoder: "msgspec.msgpack.Decoder[M]", body: bytes, otherwise: str) -> M:
    """Decode a frame's body; FrameError with the text `otherwise` if it cannot be read."""
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise FrameError(f"{otherwise}: {error}") from None


class FrameKind(IntEnum):
    """The encoding of the body."""

    CONTROL = 1
    TOKENS = 2


_KINDS = {kind.value: kind for kind in FrameKind}


class Frame(NamedTuple):
    """One message's bytes."""

    kind: FrameKind
    body: bytes


_new = tuple.__new__  # half the time of calling the class


def encode_frame(kind: FrameKind, body: bytes) -> bytes:
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"frame body of {len(body)} bytes is above the limit {MAX_FRAME_BYTES}")
    return _HEADER.pack(MAGIC, VERSION, kind, len(body)) + body


def decode_header(
    data: bytes | bytearray, start: int = 0, max_bytes: int = MAX_FRAME_BYTES
) -> tuple[FrameKind, int]:
    """The kind and the length of the body that follows."""
    magic, version, kind, length = _HEADER.unpack_from(data, start)
    if magic != MAGIC:
        raise FrameError(f"frame begins with {magic!r}, not {MAGIC!r}: the peer is not a worker")
    if version != VERSION:
        raise FrameError(f"frame version {version}, this process speaks {VERSION}")
    if length > max_bytes:
        raise FrameError(f"frame of {length} bytes is above the limit {max_bytes}")
    known = _KINDS.get(kind)
    if known is None:
        raise FrameError(f"frame kind {kind} is unknown")
    return known, length


class FrameDecoder:
    """Cuts a stream of bytes into frames, whatever the sizes of its pieces."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def allow(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[Frame]:
        """Take received bytes; return the frames that they complete."""
        if self._buffer:
            self._buffer += data
            if not self._is_complete():  # a frame in many pieces is copied once, when complete
                return []
            data = bytes(self._buffer)
        frames: list[Frame] = []
        start, size, max_bytes = 0, len(data), self._max_bytes
        while (body := start + HEADER_BYTES) <= size:
            magic, version, number, length = _HEADER.unpack_from(data, start)
            kind = _KINDS.get(number)
            if magic != MAGIC or version != VERSION or kind is None or length > max_bytes:
                kind, length = decode_header(data, start, max_bytes)  # says what is wrong
            end = body + length
            if size < end:
                break
            frames.append(_new(Frame, (kind, data[body:end])))
            start = end
        if start < size or self._buffer:
            self._buffer[:] = data[start:]
        return frames

    def _is_complete(self) -> bool:
        if len(self._buffer) < HEADER_BYTES:
            return False
        _, length = decode_header(self._buffer, 0, self._max_bytes)
        return len(self._buffer) >= HEADER_BYTES + length

    def finish(self) -> None:
        """The stream ended: raise if it ended inside a frame."""
        if self._buffer:
            raise FrameError(f"the stream ended {len(self._buffer)} bytes into a frame")
