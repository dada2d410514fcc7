"""Publishes a version's buckets, whole and as deltas since the previous one, then seals it."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slackwater.weights.relay.bucket import (
    BUCKET_BYTES,
    Bytes,
    Manifest,
    Payload,
    TensorEntry,
    buckets_of,
    encode_changes,
    part_checksums,
    tag_of,
    whole_views,
)
from slackwater.weights.relay.bucket_store import BucketKey
from slackwater.weights.relay.client import Address, RelayClient

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "F32": torch.float32, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
# What NumPy has too.
_PLAIN = {
    "U8": "u1", "I8": "i1", "I16": "i2", "F16": "f2", "I32": "i4",
    "F32": "f4", "I64": "i8", "F64": "f8",
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


_BASES = 4  # models whose last version is kept, to find out what changed


class PublishTarget(Protocol):
    """Where buckets go: a relay's client, or in tests a shelf."""

    def put(self, key: BucketKey, size: int, tag: int, views: Sequence[memoryview]) -> None:
        """Store a bucket of bytes with this tag; a no-op if it is there."""
        ...

    def seal(self, manifest: Manifest) -> None:
        """Make the version visible."""
        ...


@dataclass(frozen=True, slots=True)
class HostVersion:
    """A version in host memory: its tensors' bytes in the order of `tensors`. Not to be changed."""

    version: str
    tensors: tuple[TensorEntry, ...]
    arrays: tuple[Bytes, ...]
    meta: Mapping[str, object]


def publish(
    target: PublishTarget,
    new: HostVersion,
    base: HostVersion | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Manifest:
    """Send a version bucket by bucket and make it visible.

    With a `base` of the same tensors also send the deltas, if they are smaller than the whole.
    """
    buckets = buckets_of(new.tensors, bucket_bytes)
    whole = Payload(new.version)
    sizes: list[int] = []
    checksums: list[tuple[int, ...]] = []
    for number, bucket in enumerate(buckets):
        views = whole_views(new.arrays, bucket)
        sizes.append(sum(map(len, views)))
        checksums.append(tuple(part_checksums(new.arrays, bucket)))
        target.put(BucketKey(whole, number), sizes[-1], tag_of(checksums[-1]), views)
    by_base = {"": tuple(sizes)}
    if base is not None and base.tensors == new.tensors and base.version != new.version:
        changes = [encode_changes(base.arrays, new.arrays, bucket) for bucket in buckets]
        if sum(map(len, changes)) < sum(sizes):
            since = Payload(new.version, base.version)
            for number, data in enumerate(changes):
                target.put(
                    BucketKey(since, number),
                    len(data),
                    tag_of(checksums[number]),
                    [memoryview(data)],
                )
            by_base[base.version] = tuple(map(len, changes))
    manifest = Manifest(
        new.version, dict(new.meta), new.tensors, bucket_bytes, tuple(checksums), by_base
    )
    target.seal(manifest)
    return manifest


class RelayStocker:
    """For one thread; the weight director decides when stocked versions go."""

    def __init__(self, relay: Address, secret: bytes, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._relay, self._secret, self._bucket_bytes = relay, secret, bucket_bytes
        self._last: OrderedDict[str, HostVersion] = OrderedDict()

    def stock(self, line: str, new: HostVersion) -> Manifest:
        """Put the next version of the model `line` there; visible when all of it is."""
        base = self._last.pop(line, None)
        with RelayClient(self._relay, self._secret) as client:
            manifest = publish(client, new, base, self._bucket_bytes)
        self._last[line] = new
        while len(self._last) > _BASES:
            self._last.popitem(last=False)
        return manifest


def host_version(
    version: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, own: bool = False
) -> HostVersion:
    """A host copy of the tensors, sorted by name; with `own`, host tensors are not copied."""
    entries: list[TensorEntry] = []
    arrays: list[Bytes] = []
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        entries.append(TensorEntry(name, _NAMES[tensor.dtype], tuple(tensor.shape)))
        host = tensor.cpu() if own else torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        arrays.append(host.contiguous().reshape(-1).view(torch.uint8).numpy())
    return HostVersion(version, tuple(entries), tuple(arrays), dict(meta))


def torch_tensors(held: HostVersion, device: str = "cpu") -> dict[str, Tensor]:
    """The version's tensors; on the CPU they are the version's own memory, not to be changed."""
    found: dict[str, Tensor] = {}
    for entry, array in zip(held.tensors, held.arrays, strict=True):
        tensor = _tensor(array, entry)
        found[entry.name] = tensor if device == "cpu" else tensor.to(device)
    return found


def _tensor(array: Bytes, entry: TensorEntry) -> Tensor:
    """Prefers a call that keeps the GIL: reacquiring it beside engine steps takes long."""
    if not len(array):
        return torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    if entry.dtype in _PLAIN:
        return torch.from_numpy(array.view(_PLAIN[entry.dtype]).reshape(entry.shape))
    return torch.from_numpy(array).view(_DTYPES[entry.dtype]).reshape(entry.shape)
