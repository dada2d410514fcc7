"""Bucket payloads: whole, or as deltas since another version.

In a delta bucket each part is a 32-bit length and a frame; length 0 means unchanged
(docs/reference/delta-format.md).
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from slackwater.weights.delta.apply import apply
from slackwater.weights.delta.checksum import checksum
from slackwater.weights.delta.encode import encode
from slackwater.weights.delta.frame import delta_error
from slackwater.weights.relay.manifest import Bucket
from slackwater.weights.relay.memory import allocate_anonymous

_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64  # a cache line, and more than any element needs
Bytes = NDArray[np.uint8]
Allocate = Callable[[int], memoryview]  # bytes


def tensor_memory(
    sizes: Iterable[int], allocate: Allocate = allocate_anonymous
) -> tuple[Bytes, ...]:
    """Arrays of these sizes in one piece of memory; their offsets follow from the sizes alone.

    Hazard: each array has its own view instead of being a slice of one array, so that its reference
    count tells whether anything else uses it.
    """
    sizes = list(sizes)
    starts = [0, *accumulate(size + -size % _ALIGNMENT for size in sizes)]
    memory = allocate(starts[-1])
    return tuple(
        np.frombuffer(memory[start : start + size], np.uint8) if size else np.empty(0, np.uint8)
        for start, size in zip(starts, sizes, strict=False)
    )


def part_checksums(arrays: Sequence[Bytes], bucket: Bucket) -> list[int]:
    return [checksum(arrays[part.tensor][part.start : part.stop]) for part in bucket]


def whole_views(arrays: Sequence[Bytes], bucket: Bucket) -> list[memoryview]:
    """Views of the bucket's bytes in order, to send from or receive into."""
    return [arrays[part.tensor][part.start : part.stop].data for part in bucket]


def encode_changes(old: Sequence[Bytes], new: Sequence[Bytes], bucket: Bucket) -> bytes:
    pieces: list[bytes] = []
    for part in bucket:
        dtype = f"u{part.item_bytes}"
        before = old[part.tensor][part.start : part.stop].view(dtype)
        after = new[part.tensor][part.start : part.stop].view(dtype)
        frame = b"" if np.array_equal(before, after) else encode(before, after)
        pieces += (_LENGTH.pack(len(frame)), frame)
    return b"".join(pieces)


def apply_changes(
    arrays: Sequence[Bytes], bucket: Bucket, data: memoryview, known: Sequence[int]
) -> list[int]:
    """Apply a delta bucket in place; the parts' new checksums. `known` are the current ones."""
    at, checksums = 0, list(known)
    for number, part in enumerate(bucket):
        if len(data) - at < _LENGTH.size:
            raise delta_error("a bucket of changes is truncated")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > len(data) - at:
            raise delta_error("a bucket of changes is truncated")
        if length:
            elements = arrays[part.tensor][part.start : part.stop].view(f"u{part.item_bytes}")
            checksums[number] = apply(elements, data[at : at + length], known[number])
        at += length
    if at != len(data):
        raise delta_error(f"{len(data) - at} bytes follow a bucket's last part")
    return checksums
