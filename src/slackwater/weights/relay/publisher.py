"""Publishes a version's buckets, whole and as deltas since the previous one, then seals it."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slackwater.model.payload import Payload
from slackwater.weights.relay.bucket import Bytes, encode_changes, part_checksums, whole_views
from slackwater.weights.relay.bucket_store import BucketKey
from slackwater.weights.relay.client import Address, RelayClient
from slackwater.weights.relay.manifest import (
    BUCKET_BYTES,
    Manifest,
    TensorEntry,
    buckets_of,
    tag_of,
)

_BASES = 4  # models whose last version is kept as the base of the next delta
_DENSE = 0.5  # a delta of more of the whole costs more processor time than a fast network
_WHOLE_ONLY = 15  # so many versions go without a delta after a dense one


class PublishTarget(Protocol):
    """Where buckets are published: a relay's client, or a store in tests."""

    def put(self, key: BucketKey, size: int, tag: int, views: Sequence[memoryview]) -> None:
        """Store a bucket of bytes with this tag; a no-op if it is stored already."""

    def seal(self, manifest: Manifest) -> None:
        """Make the version visible."""


@dataclass(frozen=True, slots=True)
class HostVersion:
    """A version in host memory: its tensors' bytes in the order of `tensors`. Read-only."""

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


class RelayPublisher:
    """Publishes versions to a relay, for one thread; the weight director decides when they go.

    Without `dense_deltas`, as on a fast network, a model whose last delta was more than half of the
    whole goes without deltas for some versions.
    """

    def __init__(
        self,
        relay: Address,
        secret: bytes,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        dense_deltas: bool = True,
    ) -> None:
        self._relay, self._secret, self._bucket_bytes = relay, secret, bucket_bytes
        self._dense_deltas = dense_deltas
        self._last: OrderedDict[str, HostVersion] = OrderedDict()
        self._whole_only: Counter[str] = Counter()  # versions of a model still to go without

    def stock(self, model: str, new: HostVersion) -> Manifest:
        """Publish the next version of a model, whole and as a delta from its last one."""
        base = self._last.pop(model, None)
        if self._whole_only[model]:
            self._whole_only[model] -= 1
            base = None
        with RelayClient(self._relay, self._secret) as client:
            manifest = publish(client, new, base, self._bucket_bytes)
        if base is not None and not self._dense_deltas:
            whole = manifest.sizes[""]
            if sum(manifest.sizes.get(base.version, whole)) > _DENSE * sum(whole):
                self._whole_only[model] = _WHOLE_ONLY
        self._last[model] = new
        while len(self._last) > _BASES:
            oldest, _ = self._last.popitem(last=False)
            del self._whole_only[oldest]
        return manifest
