"""Publishes onto a store of this process, without a relay."""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.weights.relay.bucket_store import BucketKey, BucketStore
from slackwater.weights.relay.manifest import Manifest


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ShelfTarget:
    """Buckets go on a store in this process, where they lie if it is not shared; waits up to
    `wait_s` for room.
    """

    store: BucketStore
    wait_s: float = 30.0

    def put(self, key: BucketKey, size: int, tag: int, views: Sequence[memoryview]) -> None:
        own = tuple(views)
        slot = self.store.begin_write(key, size, tag, self.wait_s, own, owner=self)
        if slot is None:
            return
        if slot.views is not own:
            at = 0
            for view in views:
                for piece in slot.pieces(at, at + len(view)):
                    piece[:] = view[: len(piece)]
                    view = view[len(piece) :]
                    at += len(piece)
        self.store.advance(slot, size)

    def seal(self, manifest: Manifest) -> None:
        self.store.seal(manifest)
