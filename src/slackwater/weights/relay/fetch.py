"""Fills a store from another relay: parallel buckets, resumed where they broke off."""

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from slackwater.model.errors import SlackwaterError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.weights.relay.bucket_store import BucketKey, BucketSlot, BucketStore
from slackwater.weights.relay.client import Address, RelayClient
from slackwater.weights.relay.manifest import Manifest, tag_of
from slackwater.weights.relay.peers import RelayPeer

_WORTH_A_STREAM = 4 << 20  # bytes; for fewer, one more connection takes longer than it saves
Memory = Sequence[tuple[memoryview, ...]]  # a bucket's pieces, by its number
Seen = Callable[[int, int, int], None]  # of a bucket, these bytes have come: from, to


class RelayFetch:
    """Fetches payloads from one relay; `cancel` stops it from any thread."""

    def __init__(
        self,
        shelf: BucketStore,
        address: Address,
        secret: bytes | RelayPeer,
        *,
        node: str = "",
        streams: int = 4,
        timeout_s: float = 30.0,
    ) -> None:
        """`node` is this store's; `timeout_s` limits the peer's silence."""
        self._shelf, self._address, self._secret = shelf, address, secret
        self._node, self._streams, self._timeout_s = node, streams, timeout_s
        self._lock = threading.Lock()
        self._clients: list[RelayClient] = []
        self._cancelled = False
        self.received_bytes = 0

    def manifest(self, version: str) -> Manifest:
        """The version's manifest, as the other relay has it."""
        with self._client() as client:
            self._open(client)
            return client.manifest(version)

    def run(
        self,
        payload: Payload,
        manifest: Manifest,
        memory: Memory | None = None,
        seen: Seen | None = None,
    ) -> None:
        """Fetch incomplete buckets; `memory` is the caller's, per bucket, to receive into.

        `seen` is called in the receiving thread before others learn of the bytes.
        """
        waiting: queue.SimpleQueue[tuple[BucketKey, int, int]] = queue.SimpleQueue()
        sizes = manifest.sizes[payload.base]
        keys = [BucketKey(payload, number) for number in range(len(sizes))]
        tags = [tag_of(sums) for sums in manifest.checksums]
        filled = self._shelf.filled(keys)
        missing = [
            (key, size, tag)
            for key, size, tag, have in zip(keys, sizes, tags, filled, strict=True)
            if have < size or size == 0
        ]
        for each in missing:
            waiting.put(each)
        failures: list[SlackwaterError] = []

        def work() -> None:
            try:
                with self._client() as client:
                    self._open(client)
                    while not failures:
                        with suppress(queue.Empty):
                            self._take(client, memory, seen, *waiting.get_nowait())
                            continue
                        return
            except SlackwaterError as error:
                failures.append(error)

        to_come = sum(size for _, size, _ in missing)
        count = min(self._streams, len(missing), to_come // _WORTH_A_STREAM + 1)
        threads = [threading.Thread(target=work, daemon=True) for _ in range(count - 1)]
        for thread in threads:
            thread.start()
        if missing:
            work()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def cancel(self) -> None:
        """Close every connection; received bytes stay."""
        with self._lock:
            self._cancelled = True
            clients = list(self._clients)
        for client in clients:
            client.close()

    def _client(self) -> RelayClient:
        return RelayClient(
            self._address, self._secret, self._timeout_s, called_off=lambda: self._cancelled
        )

    def _open(self, client: RelayClient) -> None:
        with self._lock:
            if self._cancelled:
                raise UnavailableError("the pull was called off")
            self._clients.append(client)

    def _take(
        self,
        client: RelayClient,
        memory: Memory | None,
        seen: Seen | None,
        key: BucketKey,
        size: int,
        tag: int,
    ) -> None:
        views = None if memory is None else memory[key.number]
        slot = self._shelf.begin(key, size, tag, views=views)
        if slot is None:
            return
        start = slot.filled

        def arrived(filled: int) -> None:
            if seen is not None:
                seen(key.number, slot.filled, filled)
            self._shelf.advance(slot, filled)

        try:
            client.get(key, slot.views, offset=start, node=self._node, arrived=arrived)
        finally:
            self._count(slot, start)
            self._shelf.fail(slot)

    def _count(self, slot: BucketSlot, start: int) -> None:
        with self._lock:
            self.received_bytes += slot.filled - start
