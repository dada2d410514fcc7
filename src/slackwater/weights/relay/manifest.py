"""A version's manifest: its tensors in buckets of at most 64 MB, a checksum per part. No torch.

A bucket is a list of byte ranges of tensors; both sides derive the same list from the tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import msgspec

from slackwater.model.errors import ConfigError

BUCKET_BYTES = 64 << 20
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's name, its safetensors type, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError.of(f"tensor {self.name}", self.dtype, "is a type that cannot be sent")
        return ITEM_BYTES[self.dtype]

    @property
    def size(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class ManifestPart:
    """Bytes `start` to `stop` of tensor number `tensor`, compared `item_bytes` at a time."""

    tensor: int
    start: int
    stop: int
    item_bytes: int


Bucket = tuple[ManifestPart, ...]


@lru_cache(maxsize=2)  # one model's versions have the same
def buckets_of(
    tensors: tuple[TensorEntry, ...], bucket_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """The tensors' bytes in order, cut at full buckets."""
    buckets: list[list[ManifestPart]] = []
    room = 0
    for number, tensor in enumerate(tensors):
        item, start = min(tensor.item_bytes, 4), 0
        while start < tensor.size:
            if room < 8:
                buckets.append([])
                room = bucket_bytes
            stop = min(tensor.size, start + room - room % 8)
            buckets[-1].append(ManifestPart(number, start, stop, item))
            room -= stop - start
            start = stop
    return tuple(map(tuple, buckets))


def tag_of(checksums: Sequence[int]) -> int:
    """One number for a bucket's bytes; different bytes under the same name have another."""
    tag = 0
    for each in checksums:
        tag = (tag * 0x100000001B3 + each) & 0xFFFFFFFFFFFFFFFF
    return tag


class Manifest(msgspec.Struct, frozen=True):
    """A version and its payloads: bucket sizes by base ("" is the whole).

    `checksums` cover every part of every bucket of the whole.
    """

    version: str
    meta: Mapping[str, object]
    tensors: tuple[TensorEntry, ...]
    bucket_bytes: int
    checksums: tuple[tuple[int, ...], ...]
    sizes: dict[str, tuple[int, ...]]

    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets; both sides derive the same."""
        return buckets_of(self.tensors, self.bucket_bytes)

    def bytes_of(self, base: str) -> int:
        return sum(self.sizes[base])

    def check(self) -> None:
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
