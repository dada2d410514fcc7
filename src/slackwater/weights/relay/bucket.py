"""A version as buckets of at most 64 MB: whole, or as what changed since another version.

A bucket is a list of parts, each a range of one tensor's bytes; both sides find the same list from the tensors alone. In
a bucket of changes each part is a 32-bit length and a frame (docs/delta-format.md); length 0 means unchanged.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from slackwater.model.errors import ConfigError
from slackwater.weights.delta.apply import apply
from slackwater.weights.delta.checksum import checksum
from slackwater.weights.delta.encode import encode
from slackwater.weights.delta.frame import refused

BUCKET_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
Bytes = NDArray[np.uint8]


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's name, its type as safetensors writes it, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError.of(f"tensor {self.name}", self.dtype, "is no type that travels")
        return ITEM_BYTES[self.dtype]

    @property
    def size(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `start` to `stop` of tensor number `tensor`, compared `item_bytes` at a time."""

    tensor: int
    start: int
    stop: int
    item_bytes: int


Bucket = tuple[Part, ...]


def buckets_of(
    tensors: Sequence[TensorEntry], bucket_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """The tensors' bytes in order, cut where a bucket is full."""
    buckets: list[list[Part]] = []
    room = 0
    for number, tensor in enumerate(tensors):
        item, start = min(tensor.item_bytes, 4), 0
        while start < tensor.size:
            if room < 8:
                buckets.append([])
                room = bucket_bytes
            stop = min(tensor.size, start + room - room % 8)
            buckets[-1].append(Part(number, start, stop, item))
            room -= stop - start
            start = stop
    return tuple(map(tuple, buckets))


def part_checksums(arrays: Sequence[Bytes], bucket: Bucket) -> list[int]:
    """The checksum of every part of a bucket."""
    return [checksum(arrays[part.tensor][part.start : part.stop]) for part in bucket]


def tag_of(checksums: Sequence[int]) -> int:
    """One number for a bucket's bytes: another sender's bytes under the same name have another."""
    tag = 0
    for each in checksums:
        tag = (tag * 0x100000001B3 + each) & 0xFFFFFFFFFFFFFFFF
    return tag


def whole_views(arrays: Sequence[Bytes], bucket: Bucket) -> list[memoryview]:
    """The bucket's bytes where they lie, in order: to send from, or to receive into."""
    return [arrays[part.tensor][part.start : part.stop].data for part in bucket]


def encode_changes(old: Sequence[Bytes], new: Sequence[Bytes], bucket: Bucket) -> bytes:
    """The bucket of what changed from `old` to `new`."""
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
    """Apply a bucket of changes in place; the parts' new checksums. `known` are those that they have now."""
    at, reached = 0, list(known)
    for number, part in enumerate(bucket):
        if len(data) - at < _LENGTH.size:
            raise refused("a bucket of changes is cut")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > len(data) - at:
            raise refused("a bucket of changes is cut")
        if length:
            elements = arrays[part.tensor][part.start : part.stop].view(f"u{part.item_bytes}")
            reached[number] = apply(elements, data[at : at + length], known[number])
        at += length
    if at != len(data):
        raise refused(f"{len(data) - at} bytes follow a bucket's last part")
    return reached


class Cargo(msgspec.Struct, frozen=True, array_like=True):
    """What travels: a version whole (`base` is empty), or what changed in it since `base`."""

    version: str
    base: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """What a version is, and what there is to fetch of it: sizes of buckets by base ("" is the whole).

    `checksums` are of every part of every bucket of the whole.
    """

    version: str
    meta: Mapping[str, object]
    tensors: tuple[TensorEntry, ...]
    bucket_bytes: int
    checksums: tuple[tuple[int, ...], ...]
    sizes: dict[str, tuple[int, ...]]

    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, which both sides find alike."""
        return buckets_of(self.tensors, self.bucket_bytes)

    def bytes_of(self, base: str) -> int:
        """How much there is to fetch of one cargo."""
        return sum(self.sizes[base])

    def check(self) -> None:
        """Refuse what does not fit together."""
        if not 1 << 12 <= self.bucket_bytes <= 1 << 30 or len(self.tensors) > 1 << 20:
            raise ConfigError.of("bucket_bytes", self.bucket_bytes, "must be 4 KiB to 1 GiB")
        buckets = self.buckets()
        shape = [len(bucket) for bucket in buckets]
        if [len(sums) for sums in self.checksums] != shape:
            raise ConfigError.of("manifest", self.version, "has checksums of other parts")
        for base, sizes in self.sizes.items():
            if len(sizes) != len(buckets) or base == self.version:
                raise ConfigError.of("manifest", self.version, f"has other buckets since {base!r}")
            for size, bucket in zip(sizes, buckets, strict=True):
                whole = sum(part.stop - part.start for part in bucket)
                most = whole if base == "" else whole + 256 * len(bucket) + whole // 512
                if size > most or (base == "" and size != whole):
                    raise ConfigError.of("manifest", self.version, "names a bucket of odd size")
