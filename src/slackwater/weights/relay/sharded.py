"""A version that several ranks publish, each its own slices, and of which every receiver takes
exactly what its layout holds.

A rank's slices are a version of their own on the relay, in buckets of 64 MB that are sent as they
are ready. The whole is visible when every rank has sealed its part: a receiver that asks sooner
waits, or is told which part is missing.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from slackwater.model.payload import Payload
from slackwater.weights.catalog import part_of
from slackwater.weights.plan.box import Box
from slackwater.weights.plan.shard_map import RankShards
from slackwater.weights.plan.transfer import PublishedSlice, SliceFetch, fetches
from slackwater.weights.relay.bucket import BUCKET_BYTES
from slackwater.weights.relay.bucket_store import BucketKey
from slackwater.weights.relay.client import RelayClient
from slackwater.weights.relay.manifest import Manifest, TensorEntry
from slackwater.weights.relay.publisher import HostVersion, PublishTarget, publish

Array = NDArray[np.generic]
_RANGES = 1 << 14  # runs of bytes that one request asks for


def publish_part(
    target: PublishTarget,
    version: str,
    rank: int,
    ranks: int,
    slices: Mapping[PublishedSlice, Array],
    dtype: str,
    bucket_bytes: int = BUCKET_BYTES,
) -> Manifest:
    """Send what one rank publishes; `dtype` as safetensors writes it."""
    mine = sorted(slices, key=lambda each: each.name)
    entries = tuple(TensorEntry(each.name, dtype, each.box.shape) for each in mine)
    arrays = tuple(np.ascontiguousarray(slices[each]).reshape(-1).view(np.uint8) for each in mine)
    part = HostVersion(part_of(version, rank, ranks), entries, arrays, {"ranks": ranks})
    return publish(target, part, None, bucket_bytes)


def pull_slices(
    client: RelayClient,
    version: str,
    ranks: int,
    published: Sequence[PublishedSlice],
    receiver: RankShards,
    dtype: str,
    wait_s: float = 0.0,
) -> tuple[dict[str, Array], int]:
    """A receiver's local tensors, and the bytes that came for them; NotFoundError while a rank's
    part is not sealed.
    """
    parts = [client.manifest(part_of(version, rank, ranks), wait_s) for rank in range(ranks)]
    local = {name: np.zeros(shape, dtype) for name, shape in receiver.shapes.items()}
    item = np.dtype(dtype).itemsize
    wanted: dict[tuple[PublishedSlice, Box], list[SliceFetch]] = defaultdict(list)
    for fetch in fetches(published, receiver):
        wanted[fetch.published, fetch.box].append(fetch)
    came = 0
    for (source, box), places in wanted.items():
        values = np.empty(box.shape, dtype)
        runs = list(_runs(source.box, box, item))
        _take(client, parts[source.rank], source.name, runs, values.reshape(-1).view(np.uint8))
        came += values.nbytes
        for place in places:
            local[place.local][place.place] = values
    return local, came


def _runs(whole: Box, part: Box, item: int) -> Iterator[tuple[int, int]]:
    """The bytes of `part` where `whole` lies row by row: from, to, in order."""
    shape, inner = whole.shape, part.within(whole)
    strides = [item] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    last = len(shape) - 1  # the innermost dimension that is not taken whole
    while last > 0 and inner[last].start == 0 and inner[last].stop == shape[last]:
        last -= 1
    run = strides[last] * (inner[last].stop - inner[last].start)
    for outer in product(*(range(each.start, each.stop) for each in inner[:last])):
        at = sum(place * stride for place, stride in zip(outer, strides, strict=False))
        start = at + inner[last].start * strides[last]
        yield start, start + run


def _take(
    client: RelayClient,
    manifest: Manifest,
    tensor: str,
    runs: Sequence[tuple[int, int]],
    memory: NDArray[np.uint8],
) -> None:
    """Runs of one tensor's bytes, out of the buckets that it lies in."""
    number = next(i for i, entry in enumerate(manifest.tensors) if entry.name == tensor)
    at = 0
    for bucket_number, bucket in enumerate(manifest.buckets()):
        before = 0
        for part in bucket:
            if part.tensor == number:
                inside = [
                    (max(a, part.start), min(b, part.stop))
                    for a, b in runs
                    if a < part.stop and b > part.start
                ]
                moved = [(a - part.start + before, b - part.start + before) for a, b in inside]
                key = BucketKey(Payload(manifest.version), bucket_number)
                for first in range(0, len(moved), _RANGES):
                    asked = moved[first : first + _RANGES]
                    size = sum(b - a for a, b in asked)
                    client.get_ranges(key, asked, memory[at : at + size].data)
                    at += size
            before += part.stop - part.start
