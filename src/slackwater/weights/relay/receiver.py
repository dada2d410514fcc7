"""From payloads on a shelf to a version in host memory, checked part by part."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from sys import getrefcount
from typing import TypeVar

import numpy as np

from slackwater.model.errors import NotFoundError, SlackwaterError
from slackwater.weights.delta.checksum import RunningSum
from slackwater.weights.delta.frame import DeltaError, refused
from slackwater.weights.relay.bucket import (
    Bytes,
    Manifest,
    MemoryOf,
    Payload,
    apply_changes,
    part_checksums,
    tensor_memory,
    whole_views,
)
from slackwater.weights.relay.memory import anonymous
from slackwater.weights.relay.publisher import HostVersion
from slackwater.weights.relay.reader import Memory, PayloadReceipt, RelayReader

T = TypeVar("T")
_AGAIN_S = 0.05
_UNSHARED = 3  # an array's references: its tuple, the loop, the call that counts


class DamagedDeltaError(DeltaError):
    """A delta on the way was damaged at its source."""

    payload: Payload


class Receiver:
    """Pulls versions from a relay by a given route.

    The `keep` newest versions stay in host memory (`memory_of`) as bases of deltas.
    """

    def __init__(
        self,
        reader: RelayReader,
        *,
        keep: int = 1,
        memory_of: MemoryOf = anonymous,
    ) -> None:
        self._reader = reader
        self._memory_of = memory_of
        self._keep = keep
        self._held: OrderedDict[str, tuple[HostVersion, Manifest]] = OrderedDict()
        self._payloads: list[Payload] = []

    def take(
        self, version: str, way: Sequence[Payload], *, keep: bool, within_s: float = 600.0
    ) -> tuple[HostVersion, bool]:
        """Pull a version by a given route; whether a copy is kept. Its base copy is consumed."""
        deadline_s = time.monotonic() + within_s
        base = way[0].base
        if base and base not in self._held:
            raise NotFoundError(f"version: {base!r}, which {version!r} changes, is not held here")
        manifest = self._visible(version, deadline_s)
        try:
            found = self._follow(way, manifest, deadline_s)
        finally:
            self._held.pop(base, None)
            for payload in self._payloads:
                self._reader.shelf.drop(payload)
            self._payloads.clear()
        if keep:
            self._held[version] = (found, manifest)
            while len(self._held) > self._keep:
                self._held.popitem(last=False)
        return found, keep

    def _visible(self, version: str, deadline_s: float) -> Manifest:
        """The version's manifest; waits for it."""

        def ask() -> Manifest:
            left_s = deadline_s - time.monotonic()
            return self._reader.manifest(version, min(max(left_s, 0.0), 10.0))

        return self._insisting(ask, deadline_s, (NotFoundError, ConnectionError))

    def _insisting(
        self,
        ask: Callable[[], T],
        deadline_s: float,
        transient: tuple[type[Exception], ...] = (ConnectionError,),
    ) -> T:
        """What the relay answers, asked again until the deadline while the link to it is down."""
        while True:
            try:
                return ask()
            except transient:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise
                time.sleep(min(_AGAIN_S, left_s))

    def _follow(
        self, payloads: Sequence[Payload], manifest: Manifest, deadline_s: float
    ) -> HostVersion:
        arrays: tuple[Bytes, ...] = ()
        sums: list[list[int]] = []
        at = manifest
        start = payloads[0].base if payloads else manifest.version
        if start:
            at = self._held[start][1]
            sums = [list(each) for each in at.checksums]
            arrays = self._to_change(start)
        for payload in payloads:
            at = (
                manifest
                if payload.version == manifest.version
                else self._insisting(partial(self._reader.manifest, payload.version), deadline_s)
            )
            memory: Memory | None = None
            coming: _ComingSums | None = None
            if not payload.base:
                sizes = [tensor.size for tensor in at.tensors]
                arrays = tensor_memory(sizes, self._memory_of)
                memory = [tuple(whole_views(arrays, bucket)) for bucket in at.buckets()]
                coming = _ComingSums(memory)
            seen = None if coming is None else coming.seen
            arrival = PayloadReceipt(self._reader, payload, at, deadline_s, memory, seen)
            try:
                if memory is None or coming is None:
                    sums = _applied(arrival, at, arrays, sums)
                else:
                    sums = _whole(arrival, at, arrays, memory, coming)
                if [tuple(each) for each in sums] != list(at.checksums):
                    raise refused(
                        f"{payload.version!r} came with other bytes than its manifest says"
                    )
            except DeltaError:
                with suppress(SlackwaterError):
                    arrival.finish()
                self._reader.shelf.drop(payload)
                if payload.base == "":
                    raise
                said = f"delta: one on the way to {manifest.version!r} is damaged; pull it whole"
                damaged = DamagedDeltaError(said)
                damaged.payload = payload
                raise damaged from None
            arrival.finish()
            self._payloads.append(payload)
        return HostVersion(manifest.version, manifest.tensors, arrays, manifest.meta)

    def _to_change(self, version: str) -> tuple[Bytes, ...]:
        """The version's memory to modify: its own if it has no other reader, else a copy."""
        for payload in [each for each in self._payloads if each.version == version]:
            self._reader.shelf.drop(payload)
            self._payloads.remove(payload)
        arrays = self._held[version][0].arrays
        # Read by: `_held` and this frame; a version given out, a tensor over its memory or a
        # neighbour would add to it.
        if getrefcount(self._held[version][0]) == 2 and all(
            getrefcount(array) == _UNSHARED for array in arrays
        ):
            del self._held[version]
            return arrays
        copies = tensor_memory(map(len, arrays), self._memory_of)
        for copy, array in zip(copies, arrays, strict=True):
            np.copyto(copy, array)
        return copies


class _ComingSums:
    """Checksums of a whole version's parts, computed by the receiving threads."""

    def __init__(self, memory: Memory) -> None:
        self._sums = [[RunningSum(np.frombuffer(v, np.uint8)) for v in views] for views in memory]
        self._stops = [list(accumulate(map(len, views))) for views in memory]

    def seen(self, number: int, start: int, stop: int) -> None:
        """Of a bucket, these bytes have come."""
        begin = 0
        for running, end in zip(self._sums[number], self._stops[number], strict=True):
            first, last = max(start, begin), min(stop, end)
            if first < last:
                running.add(first - begin, last - begin)
            begin = end

    def of(self, number: int) -> list[int]:
        """A bucket that is complete."""
        return [running.value() for running in self._sums[number]]


def _whole(
    arrival: PayloadReceipt,
    manifest: Manifest,
    arrays: tuple[Bytes, ...],
    memory: Memory,
    coming: _ComingSums,
) -> list[list[int]]:
    """Receive a whole version into its tensors; returns checksums."""
    sums: list[list[int]] = []
    for number, bucket in enumerate(manifest.buckets()):
        with arrival.bucket(number) as views:
            if views is memory[number]:
                sums.append(coming.of(number))
            else:  # begun by an earlier pull, into other memory
                _copy(views, memory[number])
                sums.append(part_checksums(arrays, bucket))
    return sums


def _applied(
    arrival: PayloadReceipt, manifest: Manifest, arrays: tuple[Bytes, ...], known: list[list[int]]
) -> list[list[int]]:
    """Apply a delta in place; the checksums that the parts have now."""
    reached: list[list[int]] = []
    for number, bucket in enumerate(manifest.buckets()):
        with arrival.bucket(number) as views:
            reached.append(apply_changes(arrays, bucket, views[0], known[number]))
    return reached


def _copy(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """Copy memory that is cut into other pieces."""
    data = np.concatenate([np.frombuffer(view, np.uint8) for view in source])
    at = 0
    for view in target:
        np.frombuffer(view, np.uint8)[:] = data[at : at + len(view)]
        at += len(view)
