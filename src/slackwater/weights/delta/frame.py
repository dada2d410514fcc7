"""The frame of one part: a header, then streams, raw or compressed.

The format: docs/reference/delta-format.md. Every length is checked against the number of elements
before a byte is unpacked, so reading allocates no more than the part needs.
"""

import struct
import threading
import zlib
from dataclasses import dataclass
from enum import IntEnum

import zstandard

from slackwater.model.errors import ConfigError

BLOCK = 1 << 16  # elements of a block; positions in it fit 16 bits
BITMAP_BYTES = BLOCK // 8
MAGIC = b"SWdf"
FORMAT = 1
_HEAD = struct.Struct("<4sBBBBQQQI")
_STREAM = struct.Struct("<BII")
HEAD_BYTES = _HEAD.size


class IndexEncoding(IntEnum):
    """How a block encodes which of its elements changed."""

    NONE = 0
    DENSE = 1
    BITMAP = 2
    GAPS = 3
    RUNS = 4


class ValueEncoding(IntEnum):
    """A value is the new element, or its zigzag-coded step from the old one."""

    ELEMENT = 0
    STEP = 1


class DeltaError(ConfigError):
    """The bytes are not a valid delta of this part. The part is unchanged."""


def delta_error(why: str) -> DeltaError:
    return DeltaError(f"delta: {why}; pull the version whole or take the delta again")


@dataclass(frozen=True, slots=True)
class DeltaFrame:
    """A frame: per-block kinds and sizes, positions, and the values' byte planes."""

    item_bytes: int
    form: ValueEncoding
    elements: int
    base_checksum: int
    checksum: int
    kinds: bytes
    sizes: bytes
    positions: bytes
    planes: tuple[bytes, ...]


def pack(frame: DeltaFrame) -> bytes:
    """The frame's bytes; value planes are compressed if that saves enough."""
    table, body = [], []
    for stream in (frame.kinds, frame.sizes, frame.positions):
        table.append(_STREAM.pack(0, len(stream), len(stream)))
        body.append(stream)
    for plane in frame.planes:
        coding, stored = _compress(plane)
        table.append(_STREAM.pack(coding, len(plane), len(stored)))
        body.append(stored)
    content = b"".join((*table, *body))
    head = _HEAD.pack(
        MAGIC,
        FORMAT,
        frame.item_bytes,
        frame.form,
        0,
        frame.elements,
        frame.base_checksum,
        frame.checksum,
        zlib.crc32(content),
    )
    return head + content


def unpack(data: bytes | memoryview, elements: int, item_bytes: int) -> DeltaFrame:
    """The frame in `data`, which must be of a part with this many elements of this size."""
    view = memoryview(data).cast("B")
    if len(view) < HEAD_BYTES:
        raise delta_error(f"{len(view)} bytes are no frame")
    magic, version, item, form, zero, count, base, result, crc = _HEAD.unpack(view[:HEAD_BYTES])
    if magic != MAGIC or version != FORMAT or zero != 0 or form not in (0, 1):
        raise delta_error("it does not begin as a frame of format 1")
    if (count, item) != (elements, item_bytes):
        raise delta_error(
            f"it is of {count} elements of {item} bytes, the part has {elements} of {item_bytes}"
        )
    content = view[HEAD_BYTES:]
    if zlib.crc32(content) != crc:
        raise delta_error("its bytes are not as written")
    kinds, sizes, positions, *planes = _streams(content, elements, item_bytes)
    return DeltaFrame(
        item, ValueEncoding(form), count, base, result, kinds, sizes, positions, tuple(planes)
    )


def _streams(content: memoryview, elements: int, item_bytes: int) -> list[bytes]:
    blocks = -(-elements // BLOCK)
    limits = [2 * blocks, 6 * blocks, blocks * BITMAP_BYTES, *[elements] * item_bytes]
    start = _STREAM.size * len(limits)
    if len(content) < start:
        raise delta_error("its table of streams is cut")
    streams = []
    for number, limit in enumerate(limits):
        coding, raw, stored = _STREAM.unpack_from(content, number * _STREAM.size)
        if raw > limit or stored > len(content) - start:
            raise delta_error(
                f"stream {number} has {raw} bytes, more than {limit} or than are there"
            )
        streams.append(_decompress(content[start : start + stored], coding, raw))
        start += stored
    if start != len(content):
        raise delta_error(f"{len(content) - start} bytes follow its last stream")
    return streams


_SAMPLE = 1 << 16
_kept = threading.local()


def _compress(plane: bytes) -> tuple[int, bytes]:
    """(1, compressed) if that is at least 3 % smaller, else (0, as it is)."""
    if len(plane) < 64:
        return 0, plane
    compressor = zstandard.ZstdCompressor(
        level=1, write_checksum=False, write_content_size=True, write_dict_id=False
    )
    if len(plane) > 4 * _SAMPLE:
        middle = len(plane) // 2
        sample = plane[:_SAMPLE] + plane[middle : middle + _SAMPLE]
        if len(compressor.compress(sample)) > 0.97 * len(sample):
            return 0, plane
    found = compressor.compress(plane)
    return (1, found) if len(found) < 0.97 * len(plane) else (0, plane)


def _decompressor() -> zstandard.ZstdDecompressor:
    """This thread's decompressor: creating one takes longer than a small stream."""
    found: zstandard.ZstdDecompressor | None = getattr(_kept, "decompressor", None)
    if found is None:
        found = _kept.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    return found


def _decompress(stored: memoryview, coding: int, raw: int) -> bytes:
    if coding == 0:
        if len(stored) != raw:
            raise delta_error(f"a stream of {raw} bytes is stored in {len(stored)}")
        return bytes(stored)
    if coding != 1:
        raise delta_error(f"stream coding {coding} is unknown here")
    # Behind an empty Zstandard frame the check for extra data below would see nothing.
    if raw == 0:
        raise delta_error("an empty stream is stored as it is, not compressed")
    try:
        if zstandard.frame_content_size(stored) != raw:
            raise delta_error("a compressed stream is not of the size that it names")
        found = _decompressor().decompress(stored, max_output_size=raw, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise delta_error(f"a compressed stream is damaged ({error})") from None
    if len(found) != raw:
        raise delta_error("a compressed stream is cut")
    return found
