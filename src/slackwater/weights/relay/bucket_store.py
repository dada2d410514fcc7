"""Buckets in memory, bounded: written once by one, read by many, also while it is being written."""

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
from slackwater.weights.relay.memory import anonymous

_GIVEN_UP = 64  # versions that are remembered as given up
_NOBODY = 1 << 62


class BucketKey(msgspec.Struct, frozen=True, array_like=True):
    """One bucket of a payload."""

    payload: Payload
    number: int


@dataclass(slots=True, eq=False)
class BucketSlot:
    """A bucket's memory in pieces, `filled` so far; processes on this node map `descriptor`.

    Whoever waits for more than `wake_above` bytes is woken only when they are there.
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
    wake_above: int = _NOBODY

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
    _slots: dict[BucketKey, BucketSlot] = field(default_factory=dict)
    _manifests: dict[str, Manifest] = field(default_factory=dict)
    _expected: set[Payload] = field(default_factory=set)
    _given_up: dict[str, None] = field(default_factory=dict)
    _publishers: dict[str, "weakref.ref[object]"] = field(default_factory=dict)
    _used: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    # ---- writing ----
    def begin(
        self,
        key: BucketKey,
        size: int,
        tag: int,
        wait_s: float = 0.0,
        views: tuple[memoryview, ...] | None = None,
        owner: object | None = None,
    ) -> BucketSlot | None:
        """A slot to fill from its `filled` on; None if it is complete or another still fills it.

        Waits up to `wait_s` for that and for room: back-pressure on publishers and pullers.
        Unsealed bytes of a sender with another `tag` are discarded; but the first `owner` of a
        version is its publisher until it is sealed or the owner is gone, and others are refused.
        `views` is caller's memory to use, which must not change once filled.
        """
        deadline_s = time.monotonic() + wait_s
        version = key.payload.version
        with self._changed:
            if owner is not None and self._publisher(version) is None:
                self._publishers[version] = weakref.ref(owner)
            while True:
                held = self._held(key, tag, owner)
                if held is not None:
                    if held.size != size or held.tag != tag:
                        raise _other_weights(key.payload.version)
                    if held.complete:
                        return None
                    if held.failed:
                        held.failed = False
                        return held
                    if not self._changed.wait(max(deadline_s - time.monotonic(), 0.0)):
                        return None
                    continue
                if size > self.max_bytes:
                    raise RefusedError(f"a bucket of {size} bytes is above {self.max_bytes}")
                if self._used + size <= self.max_bytes:
                    break
                if not self._changed.wait(max(deadline_s - time.monotonic(), 0.0)):
                    raise UnavailableError(
                        f"relay memory: {self._used} of {self.max_bytes} bytes are held; retire "
                        "versions or give it more"
                    )
            descriptor = None
            if views is None or self.shared:
                memory, descriptor = self._allocate(size)
                views = (memory,)
            slot = self._slots[key] = BucketSlot(key, size, tag, views, descriptor)
            self._used += size
            return slot

    def advance(self, slot: BucketSlot, filled: int) -> None:
        """More bytes of a slot are there; wakes readers that can use them."""
        with self._changed:
            slot.filled = filled
            if filled > slot.wake_above or slot.complete:
                slot.wake_above = _NOBODY
                self._changed.notify_all()

    def fail(self, slot: BucketSlot) -> None:
        """The writer is gone; its bytes stay for the next one to continue."""
        with self._changed:
            slot.failed = not slot.complete
            self._changed.notify_all()

    def seal(self, manifest: Manifest) -> None:
        """Make a version visible; refused unless all of every payload that it names is there."""
        manifest.check()
        with self._changed:
            held = self._manifests.get(manifest.version)
            if held is not None and held.checksums != manifest.checksums:
                raise _other_weights(manifest.version)
            for base, sizes in manifest.sizes.items():
                for number, size in enumerate(sizes):
                    slot = self._slots.get(BucketKey(Payload(manifest.version, base), number))
                    fits = slot is not None and slot.complete and slot.size == size
                    if slot is not None and slot.tag != tag_of(manifest.checksums[number]):
                        raise _other_weights(manifest.version)
                    if not fits:
                        raise RefusedError(f"version: {manifest.version!r} lacks bucket {number}")
            self._manifests[manifest.version] = manifest
            self._publishers.pop(manifest.version, None)
            self._changed.notify_all()

    def release(self, owner: object) -> None:
        """A publisher is gone; others may publish what it did not seal."""
        with self._changed:
            for version in [v for v in self._publishers if self._publisher(v) is owner]:
                del self._publishers[version]

    def note(self, manifest: Manifest) -> None:
        """Register a version whose buckets are still arriving."""
        with self._changed:
            self._given_up.pop(manifest.version, None)
            self._manifests[manifest.version] = manifest
            self._changed.notify_all()

    def give_up(self, version: str) -> None:
        """A version will not arrive: fail those who wait or ask for it."""
        with self._changed:
            self._given_up[version] = None
            if len(self._given_up) > _GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
            self._changed.notify_all()

    # ---- reading ----
    def manifest(self, version: str, wait_s: float = 0.0) -> Manifest:
        """A visible version's manifest; waits for it if asked to."""
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            while version not in self._manifests:
                if version in self._given_up:
                    raise RefusedError(f"version: {version!r} was given up here; nobody has it")
                if not self._changed.wait(max(deadline_s - time.monotonic(), 0.0)):
                    held = ", ".join(list(self._manifests)[-5:]) or "none"
                    raise NotFoundError(f"version: {version!r} is not here; held are: {held}")
            return self._manifests[version]

    def manifests(self) -> tuple[Manifest, ...]:
        """Every visible version, oldest first."""
        with self._changed:
            return tuple(self._manifests.values())

    def payloads(self) -> tuple[Payload, ...]:
        """The payloads of which all is here."""
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

    def filled(self, keys: Iterable[BucketKey]) -> list[int]:
        """The number of bytes present of each bucket."""
        with self._changed:
            return [self._slots[key].filled if key in self._slots else 0 for key in keys]

    def expect(self, payload: Payload, expected: bool) -> None:
        """Mark a payload as on its way or not; readers wait for what is expected."""
        with self._changed:
            if expected:
                self._given_up.pop(payload.version, None)
                self._expected.add(payload)
            else:
                self._expected.discard(payload)
            self._changed.notify_all()

    def open(self, key: BucketKey, wait_s: float = 0.0, unexpected_s: float = 0.0) -> BucketSlot:
        """A bucket to read until `close`; waits for it if expected, else `unexpected_s`."""
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
        """The filled bytes once more than `beyond`; UnavailableError if the writer is gone."""
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            while slot.filled <= beyond and not slot.complete:
                broken = slot.failed and slot.key.payload not in self._expected
                if broken or slot.dropped:
                    raise UnavailableError(f"bucket {slot.key.number} broke off at {slot.filled}")
                slot.wake_above = min(slot.wake_above, beyond)
                if not self._changed.wait(max(deadline_s - time.monotonic(), 0.0)):
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

    @property
    def used_bytes(self) -> int:
        """Memory of buckets, those included that only readers still hold."""
        return self._used

    def close_all(self) -> None:
        """Free memory without readers."""
        with self._changed:
            for key in list(self._slots):
                slot = self._slots.pop(key)
                slot.dropped = True
                self._release(slot)
            self._manifests.clear()

    def _held(self, key: BucketKey, tag: int, owner: object | None) -> BucketSlot | None:
        """The slot of a bucket, unless another sender without a claim left it behind."""
        held = self._slots.get(key)
        if held is None or held.tag == tag or not self._unsealed(held):
            return held
        if self._publisher(key.payload.version) not in (None, owner):
            raise _other_weights(key.payload.version)
        del self._slots[key]
        held.dropped = True
        self._release(held)
        return None

    def _publisher(self, version: str) -> object | None:
        found = self._publishers.get(version)
        return None if found is None else found()

    def _unsealed(self, slot: BucketSlot) -> bool:
        manifest = self._manifests.get(slot.key.payload.version)
        if manifest is None:
            return True
        sums = manifest.checksums
        return slot.key.number >= len(sums) or tag_of(sums[slot.key.number]) != slot.tag

    def _release(self, slot: BucketSlot) -> None:
        if slot.dropped and slot.readers == 0 and slot.size >= 0:
            self._used -= slot.size
            slot.size = -1
            if slot.descriptor is not None:
                os.close(slot.descriptor)
                slot.descriptor = None
            self._changed.notify_all()

    def _allocate(self, size: int) -> tuple[memoryview, int | None]:
        if size < 4096:
            return memoryview(bytearray(size)), None
        if not self.shared or not hasattr(os, "memfd_create"):
            return anonymous(size), None
        try:
            descriptor = os.memfd_create("slackwater weights")
        except OSError:  # too many are open: this bucket goes over sockets
            return anonymous(size), None
        try:
            os.posix_fallocate(descriptor, 0, size)
            return memoryview(mmap.mmap(descriptor, size)), descriptor
        except OSError:
            os.close(descriptor)
            return anonymous(size), None


def _other_weights(version: str) -> RefusedError:
    return RefusedError(
        f"version: {version!r} is published with other weights; publish under a new name"
    )
