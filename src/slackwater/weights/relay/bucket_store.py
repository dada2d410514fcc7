"""A bounded store of buckets in memory: each has one writer and many readers, who may read a bucket
while it is being written.
"""

import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from slackwater.model.errors import NotFoundError, RefusedError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.weights.relay.manifest import Manifest, tag_of
from slackwater.weights.relay.memory import allocate_anonymous

_MAX_UNAVAILABLE = 64  # versions that are remembered as unavailable
_NO_WAITER = 1 << 62


class BucketKey(msgspec.Struct, frozen=True, array_like=True):
    """One bucket of a payload."""

    payload: Payload
    number: int


@dataclass(slots=True, eq=False)
class BucketSlot:
    """A bucket's memory in pieces, of which `filled` bytes are written; processes on this node map
    `descriptor`.

    Readers that wait are woken when more than `wake_above` bytes are filled, not with every piece.
    """

    key: BucketKey
    size: int
    tag: int
    views: tuple[memoryview, ...]
    descriptor: int | None = None
    filled: int = 0
    failed: bool = False
    readers: int = 0
    dropped: bool = False
    wake_above: int = _NO_WAITER

    @property
    def complete(self) -> bool:
        return self.filled == self.size

    @property
    def path(self) -> str:
        """The path by which this user's processes open the memory; empty if not shared."""
        return "" if self.descriptor is None else f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """The memory from `start` to `stop`."""
        for view in self.views:
            if start < len(view) and stop > 0:
                yield view[max(start, 0) : stop]
            start, stop = start - len(view), stop - len(view)


@dataclass(slots=True)
class BucketStore:
    """Slots by key and manifests by version; at most `max_bytes` of buckets.

    With `shared` this user's other processes may map the memory; it vanishes with this process.
    """

    max_bytes: int
    shared: bool = False
    used_bytes: int = field(default=0, init=False)  # with buckets that readers still hold
    _slots: dict[BucketKey, BucketSlot] = field(default_factory=dict)
    _manifests: dict[str, Manifest] = field(default_factory=dict)
    _expected: set[Payload] = field(default_factory=set)
    _unavailable: dict[str, None] = field(default_factory=dict)
    _publishers: dict[str, "weakref.ref[object]"] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    # ---- writing ----
    def begin_write(
        self,
        key: BucketKey,
        size: int,
        tag: int,
        wait_s: float = 0.0,
        views: tuple[memoryview, ...] | None = None,
        owner: object | None = None,
    ) -> BucketSlot | None:
        """A slot to write from its `filled` on; None if it is complete or another writer has it.

        Waits up to `wait_s` for another writer and for room: back-pressure on publishers and
        pullers. Unsealed bytes of a sender with another `tag` are discarded. The first `owner` is a
        version's publisher until the version is sealed or the owner is gone; other publishers are
        refused. `views` is memory of the caller to use; it must not change once filled.
        """
        deadline_s = time.monotonic() + wait_s
        version = key.payload.version
        with self._changed:
            if owner is not None and self._publisher(version) is None:
                self._publishers[version] = weakref.ref(owner)
            while True:
                slot = self._find_slot(key, tag, owner)
                if slot is not None:
                    if (slot.size, slot.tag) != (size, tag):
                        raise _conflicting_weights_error(version)
                    if slot.complete:
                        return None
                    if slot.failed:
                        slot.failed = False
                        return slot
                elif self._has_room(size):
                    return self._create_slot(key, size, tag, views)
                if not self._wait_until(deadline_s):
                    if slot is not None:
                        return None
                    raise UnavailableError(
                        f"relay memory: {self.used_bytes} of {self.max_bytes} bytes are held; "
                        "retire versions or give it more"
                    )

    def _has_room(self, size: int) -> bool:
        if size > self.max_bytes:
            raise RefusedError(f"a bucket of {size} bytes is above {self.max_bytes}")
        return self.used_bytes + size <= self.max_bytes

    def _create_slot(
        self, key: BucketKey, size: int, tag: int, views: tuple[memoryview, ...] | None
    ) -> BucketSlot:
        descriptor = None
        if views is None or self.shared:
            memory, descriptor = self._allocate(size)
            views = (memory,)
        slot = self._slots[key] = BucketSlot(key, size, tag, views, descriptor)
        self.used_bytes += size
        return slot

    def _wait_until(self, deadline_s: float) -> bool:
        """Wait for a change; False at the deadline."""
        return self._changed.wait(max(deadline_s - time.monotonic(), 0.0))

    def advance(self, slot: BucketSlot, filled: int) -> None:
        """Record that a slot has `filled` bytes; wakes readers that can use them."""
        with self._changed:
            slot.filled = filled
            if filled > slot.wake_above or slot.complete:
                slot.wake_above = _NO_WAITER
                self._changed.notify_all()

    def fail(self, slot: BucketSlot) -> None:
        """Release a slot that its writer left; another writer may continue it."""
        with self._changed:
            slot.failed = not slot.complete
            self._changed.notify_all()

    def seal(self, manifest: Manifest) -> None:
        """Make a version visible; refused unless every payload that it names is complete."""
        manifest.check()
        with self._changed:
            held = self._manifests.get(manifest.version)
            if held is not None and held.checksums != manifest.checksums:
                raise _conflicting_weights_error(manifest.version)
            for base, sizes in manifest.sizes.items():
                for number, size in enumerate(sizes):
                    slot = self._slots.get(BucketKey(Payload(manifest.version, base), number))
                    fits = slot is not None and slot.complete and slot.size == size
                    if slot is not None and slot.tag != tag_of(manifest.checksums[number]):
                        raise _conflicting_weights_error(manifest.version)
                    if not fits:
                        raise RefusedError(f"version: {manifest.version!r} lacks bucket {number}")
            self._manifests[manifest.version] = manifest
            self._publishers.pop(manifest.version, None)
            self._changed.notify_all()

    def release(self, owner: object) -> None:
        """A publisher is gone: others may publish the versions that it did not seal."""
        with self._changed:
            for version in [v for v in self._publishers if self._publisher(v) is owner]:
                del self._publishers[version]

    def register(self, manifest: Manifest) -> None:
        """Register a version whose buckets are still arriving."""
        with self._changed:
            self._unavailable.pop(manifest.version, None)
            self._manifests[manifest.version] = manifest
            self._changed.notify_all()

    def mark_unavailable(self, version: str) -> None:
        """A version will not arrive: fail calls that wait for it now or later."""
        with self._changed:
            self._unavailable[version] = None
            if len(self._unavailable) > _MAX_UNAVAILABLE:
                del self._unavailable[next(iter(self._unavailable))]
            self._changed.notify_all()

    # ---- reading ----
    def manifest(self, version: str, wait_s: float = 0.0) -> Manifest:
        """A visible version's manifest; waits for it if asked to."""
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            while version not in self._manifests:
                if version in self._unavailable:
                    raise RefusedError(
                        f"version: {version!r} is not available: no node could deliver it"
                    )
                if not self._wait_until(deadline_s):
                    held = ", ".join(list(self._manifests)[-5:]) or "none"
                    raise NotFoundError(f"version: {version!r} is not here; held are: {held}")
            return self._manifests[version]

    def manifests(self) -> tuple[Manifest, ...]:
        """Every visible version, oldest first."""
        with self._changed:
            return tuple(self._manifests.values())

    def payloads(self) -> tuple[Payload, ...]:
        """The complete payloads."""
        with self._changed:
            return tuple(
                Payload(version, base)
                for version, manifest in self._manifests.items()
                for base, sizes in manifest.sizes.items()
                if all(
                    (slot := self._slots.get(BucketKey(Payload(version, base), n)))
                    and slot.complete
                    for n in range(len(sizes))
                )
            )

    def count_filled_bytes(self, keys: Iterable[BucketKey]) -> list[int]:
        """How many bytes of each bucket are filled."""
        with self._changed:
            return [self._slots[key].filled if key in self._slots else 0 for key in keys]

    def expect(self, payload: Payload, expected: bool) -> None:
        """Mark a payload as being fetched, or not; readers wait for expected payloads."""
        with self._changed:
            if expected:
                self._unavailable.pop(payload.version, None)
                self._expected.add(payload)
            else:
                self._expected.discard(payload)
            self._changed.notify_all()

    def open(self, key: BucketKey, wait_s: float = 0.0, unexpected_s: float = 0.0) -> BucketSlot:
        """A bucket to read until `close`; waits `wait_s` if it is expected, else `unexpected_s`."""
        began_s = time.monotonic()
        deadline_s = began_s + wait_s
        with self._changed:
            while (slot := self._slots.get(key)) is None:
                now_s = time.monotonic()
                expected = key.payload in self._expected
                left_s = (deadline_s if expected else began_s + unexpected_s) - now_s
                if left_s <= 0:
                    raise NotFoundError(
                        f"bucket {key.number} of {key.payload.version!r} is not here"
                    )
                self._changed.wait(left_s)
            slot.readers += 1
            return slot

    def close(self, slot: BucketSlot) -> None:
        with self._changed:
            slot.readers -= 1
            self._release(slot)

    def wait(self, slot: BucketSlot, beyond: int, wait_s: float) -> int:
        """Wait for more than `beyond` filled bytes; UnavailableError if the writer is gone."""
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            while slot.filled <= beyond and not slot.complete:
                broken = slot.failed and slot.key.payload not in self._expected
                if broken or slot.dropped:
                    raise UnavailableError(f"bucket {slot.key.number} broke off at {slot.filled}")
                slot.wake_above = min(slot.wake_above, beyond)
                if not self._wait_until(deadline_s):
                    raise UnavailableError(f"bucket {slot.key.number} stands at {slot.filled}")
            return slot.filled

    # ---- dropping ----
    def drop(self, payload: Payload) -> None:
        """Drop a payload; readers continue. A version without payloads is no longer visible."""
        with self._changed:
            for key in [key for key in self._slots if key.payload == payload]:
                slot = self._slots.pop(key)
                slot.dropped = True
                self._release(slot)
            manifest = self._manifests.get(payload.version)
            if manifest is not None and payload.base in manifest.sizes:
                sizes = {base: s for base, s in manifest.sizes.items() if base != payload.base}
                if sizes:
                    changed = msgspec.structs.replace(manifest, sizes=sizes)
                    self._manifests[payload.version] = changed
                else:
                    del self._manifests[payload.version]
            self._changed.notify_all()

    def close_all(self) -> None:
        """Free memory without readers."""
        with self._changed:
            for key in list(self._slots):
                slot = self._slots.pop(key)
                slot.dropped = True
                self._release(slot)
            self._manifests.clear()

    def _find_slot(self, key: BucketKey, tag: int, owner: object | None) -> BucketSlot | None:
        """The slot of a bucket; discards one that another sender left without sealing it."""
        slot = self._slots.get(key)
        if slot is None or slot.tag == tag or not self._is_unsealed(slot):
            return slot
        if self._publisher(key.payload.version) not in (None, owner):
            raise _conflicting_weights_error(key.payload.version)
        del self._slots[key]
        slot.dropped = True
        self._release(slot)
        return None

    def _publisher(self, version: str) -> object | None:
        found = self._publishers.get(version)
        return None if found is None else found()

    def _is_unsealed(self, slot: BucketSlot) -> bool:
        manifest = self._manifests.get(slot.key.payload.version)
        if manifest is None:
            return True
        sums = manifest.checksums
        return slot.key.number >= len(sums) or tag_of(sums[slot.key.number]) != slot.tag

    def _release(self, slot: BucketSlot) -> None:
        if slot.dropped and slot.readers == 0 and slot.size >= 0:
            self.used_bytes -= slot.size
            slot.size = -1
            if slot.descriptor is not None:
                os.close(slot.descriptor)
                slot.descriptor = None
            self._changed.notify_all()

    def _allocate(self, size: int) -> tuple[memoryview, int | None]:
        if size < 4096:
            return memoryview(bytearray(size)), None
        if not self.shared:
            return allocate_anonymous(size), None
        try:
            descriptor = os.memfd_create("slackwater weights")
        except OSError:  # too many files are open: this bucket is sent over sockets
            return allocate_anonymous(size), None
        try:
            os.posix_fallocate(descriptor, 0, size)
            return memoryview(mmap.mmap(descriptor, size)), descriptor
        except OSError:
            os.close(descriptor)
            return allocate_anonymous(size), None


def _conflicting_weights_error(version: str) -> RefusedError:
    return RefusedError(
        f"version: {version!r} is published with other weights; publish under a new name"
    )
