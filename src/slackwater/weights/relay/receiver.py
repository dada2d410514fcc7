"""Turns fetched payloads into a version in host memory, checked part by part."""

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
from slackwater.model.payload import Payload
from slackwater.weights.delta.checksum import RunningSum
from slackwater.weights.delta.frame import DeltaError, delta_error
from slackwater.weights.relay.bucket import (
    Allocate,
    Bytes,
    apply_changes,
    part_checksums,
    tensor_memory,
    whole_views,
)
from slackwater.weights.relay.fetch import Memory, OnBytes
from slackwater.weights.relay.manifest import Manifest
from slackwater.weights.relay.memory import allocate_anonymous
from slackwater.weights.relay.publisher import HostVersion
from slackwater.weights.relay.reader import PayloadReceipt, RelayReader

T = TypeVar("T")
_RETRY_S = 0.05
_UNSHARED_REFERENCES = 3  # of an array: its tuple, the loop variable, getrefcount's argument


class DamagedDeltaError(DeltaError):
    """A delta of the route was damaged at its source."""

    def __init__(self, payload: Payload, version: str) -> None:
        super().__init__(f"delta: one on the way to {version!r} is damaged; pull it whole")
        self.payload = payload


class Receiver:
    """Pulls versions from a relay by a given route.

    The `keep` newest versions stay in host memory, made by `allocate`, as bases of deltas.
    """

    def __init__(
        self,
        reader: RelayReader,
        *,
        keep: int = 1,
        allocate: Allocate = allocate_anonymous,
    ) -> None:
        self._reader = reader
        self._allocate = allocate
        self._keep = keep
        self._kept_versions: OrderedDict[str, tuple[HostVersion, Manifest]] = OrderedDict()
        self._payloads: list[Payload] = []

    def take(
        self, version: str, route: Sequence[Payload], *, keep: bool, within_s: float = 600.0
    ) -> HostVersion:
        """Pull a version by a given route. Its base copy is consumed; `keep` keeps the new one."""
        deadline_s = time.monotonic() + within_s
        base = route[0].base
        if base and base not in self._kept_versions:
            raise NotFoundError(f"version: {base!r}, which {version!r} changes, is not held here")
        manifest = self._wait_for_manifest(version, deadline_s)
        try:
            found = self._pull_route(route, manifest, deadline_s)
        finally:
            self._kept_versions.pop(base, None)
            for payload in self._payloads:
                self._reader.store.drop(payload)
            self._payloads.clear()
        if keep:
            self._kept_versions[version] = (found, manifest)
            while len(self._kept_versions) > self._keep:
                self._kept_versions.popitem(last=False)
        return found

    def _wait_for_manifest(self, version: str, deadline_s: float) -> Manifest:
        def get_manifest() -> Manifest:
            left_s = deadline_s - time.monotonic()
            return self._reader.manifest(version, min(max(left_s, 0.0), 10.0))

        return self._retry(get_manifest, deadline_s, (NotFoundError, ConnectionError))

    def _retry(
        self,
        call: Callable[[], T],
        deadline_s: float,
        transient: tuple[type[Exception], ...] = (ConnectionError,),
    ) -> T:
        """The result of a call to the relay, repeated until the deadline while its link is down."""
        while True:
            try:
                return call()
            except transient:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise
                time.sleep(min(_RETRY_S, left_s))

    def _pull_route(
        self, route: Sequence[Payload], manifest: Manifest, deadline_s: float
    ) -> HostVersion:
        """Receive the payloads of a route one after the other, from the base copy if it has one."""
        arrays: tuple[Bytes, ...] = ()
        sums: list[list[int]] = []
        base = route[0].base
        if base:
            sums = [list(each) for each in self._kept_versions[base][1].checksums]
            arrays = self._take_base(base)
        for payload in route:
            at = manifest
            if payload.version != manifest.version:
                at = self._retry(partial(self._reader.manifest, payload.version), deadline_s)
            try:
                arrays, sums = self._receive(payload, at, arrays, sums, deadline_s)
            except DeltaError:
                if not payload.base:
                    raise
                raise DamagedDeltaError(payload, manifest.version) from None
            self._payloads.append(payload)
        return HostVersion(manifest.version, manifest.tensors, arrays, manifest.meta)

    def _receive(
        self,
        payload: Payload,
        manifest: Manifest,
        arrays: tuple[Bytes, ...],
        sums: list[list[int]],
        deadline_s: float,
    ) -> tuple[tuple[Bytes, ...], list[list[int]]]:
        """Receive a whole version into new memory, or apply a delta to `arrays` in place.

        Returns the arrays and the checksums of their parts, which are the manifest's.
        """
        memory: Memory | None = None
        on_bytes: OnBytes | None = None
        if payload.base:
            fill = partial(_apply_delta, known=sums)
        else:
            arrays = tensor_memory((tensor.size for tensor in manifest.tensors), self._allocate)
            memory = [tuple(whole_views(arrays, bucket)) for bucket in manifest.buckets()]
            arriving = _ArrivingChecksums(memory)
            fill = partial(_receive_whole, memory=memory, arriving=arriving)
            on_bytes = arriving.add
        receipt = PayloadReceipt(self._reader, payload, manifest, deadline_s, memory, on_bytes)
        try:
            sums = fill(receipt, manifest, arrays)
            if [tuple(each) for each in sums] != list(manifest.checksums):
                raise delta_error(f"the bytes of {payload.version!r} do not match its manifest")
        except DeltaError:
            with suppress(SlackwaterError):
                receipt.finish()
            self._reader.store.drop(payload)
            raise
        receipt.finish()
        return arrays, sums

    def _take_base(self, version: str) -> tuple[Bytes, ...]:
        """Memory with the version's bytes to apply deltas to: its own if unread, else a copy."""
        arrays = self._kept_versions[version][0].arrays
        # Two references mean that only `_kept_versions` and this call have the version. A version
        # given to a caller, or a tensor over its memory, adds to the counts: then it must not
        # change.
        if getrefcount(self._kept_versions[version][0]) == 2 and all(
            getrefcount(array) == _UNSHARED_REFERENCES for array in arrays
        ):
            del self._kept_versions[version]
            return arrays
        copies = tensor_memory(map(len, arrays), self._allocate)
        for copy, array in zip(copies, arrays, strict=True):
            np.copyto(copy, array)
        return copies


class _ArrivingChecksums:
    """Checksums of a whole version's parts, computed by the receiving threads."""

    def __init__(self, memory: Memory) -> None:
        self._sums = [[RunningSum(np.frombuffer(v, np.uint8)) for v in views] for views in memory]
        self._stops = [list(accumulate(map(len, views))) for views in memory]

    def add(self, number: int, start: int, stop: int) -> None:
        """Bytes `start` to `stop` of a bucket have arrived."""
        begin = 0
        for running, end in zip(self._sums[number], self._stops[number], strict=True):
            first, last = max(start, begin), min(stop, end)
            if first < last:
                running.add(first - begin, last - begin)
            begin = end

    def checksums(self, number: int) -> list[int]:
        """The checksums of a complete bucket's parts."""
        return [running.value() for running in self._sums[number]]


def _receive_whole(
    receipt: PayloadReceipt,
    manifest: Manifest,
    arrays: tuple[Bytes, ...],
    memory: Memory,
    arriving: _ArrivingChecksums,
) -> list[list[int]]:
    """Receive a whole version into its tensors; the checksums of their parts."""
    sums: list[list[int]] = []
    for number, bucket in enumerate(manifest.buckets()):
        with receipt.bucket(number) as views:
            if views is memory[number]:
                sums.append(arriving.checksums(number))
            else:  # an earlier pull began it, into other memory
                _copy(views, memory[number])
                sums.append(part_checksums(arrays, bucket))
    return sums


def _apply_delta(
    receipt: PayloadReceipt, manifest: Manifest, arrays: tuple[Bytes, ...], known: list[list[int]]
) -> list[list[int]]:
    """Apply a delta in place; the new checksums of the parts."""
    sums: list[list[int]] = []
    for number, bucket in enumerate(manifest.buckets()):
        with receipt.bucket(number) as views:
            sums.append(apply_changes(arrays, bucket, views[0], known[number]))
    return sums


def _copy(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """Copy memory between views that are cut differently."""
    data = np.concatenate([np.frombuffer(view, np.uint8) for view in source])
    at = 0
    for view in target:
        np.frombuffer(view, np.uint8)[:] = data[at : at + len(view)]
        at += len(view)
