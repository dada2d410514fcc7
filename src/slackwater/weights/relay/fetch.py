"""Fills a store from another relay: buckets in parallel, resumed after a broken connection."""

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from slackwater.model.errors import SlackwaterError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.weights.relay.bucket_store import BucketKey, BucketStore
from slackwater.weights.relay.client import Address, RelayClient
from slackwater.weights.relay.manifest import Manifest, tag_of
from slackwater.weights.relay.peers import RelayPeer

_WORTH_A_STREAM = 4 << 20  # bytes; for fewer, another connection costs more than it saves
Memory = Sequence[tuple[memoryview, ...]]  # a bucket's pieces, by its number
OnBytes = Callable[[int, int, int], None]  # bucket, from, to: these bytes have arrived


class RelayFetch:
    """Fetches payloads from one relay; `cancel` stops it from any thread."""

    def __init__(
        self,
        store: BucketStore,
        address: Address,
        secret: bytes | RelayPeer,
        *,
        node: str = "",
        streams: int = 4,
        timeout_s: float = 30.0,
    ) -> None:
        """`node` is this store's; `timeout_s` limits the peer's silence."""
        self._store, self._address, self._secret = store, address, secret
        self._node, self._streams, self._timeout_s = node, streams, timeout_s
        self._lock = threading.Lock()
        self._clients: list[RelayClient] = []
        self._connected: RelayClient | None = None  # another handshake takes some milliseconds
        self._cancelled = False

    def manifest(self, version: str) -> Manifest:
        """The version's manifest at the other relay; `run` or `cancel` ends the connection."""
        self._connected = self._connect()
        return self._connected.manifest(version)

    def run(
        self,
        payload: Payload,
        manifest: Manifest,
        memory: Memory | None = None,
        on_bytes: OnBytes | None = None,
    ) -> None:
        """Fetch the buckets that are not complete; `memory`, per bucket, is where to receive them.

        `on_bytes` is called in the receiving thread, before readers can see the bytes.
        """
        to_fetch: queue.SimpleQueue[tuple[BucketKey, int, int]] = queue.SimpleQueue()
        sizes = manifest.sizes[payload.base]
        keys = [BucketKey(payload, number) for number in range(len(sizes))]
        tags = [tag_of(sums) for sums in manifest.checksums]
        filled = self._store.count_filled_bytes(keys)
        missing = [
            (key, size, tag)
            for key, size, tag, have in zip(keys, sizes, tags, filled, strict=True)
            if have < size or size == 0
        ]
        for each in missing:
            to_fetch.put(each)
        failures: list[SlackwaterError] = []

        def work() -> None:
            try:
                with self._connection() as client:
                    while not failures:
                        with suppress(queue.Empty):
                            self._fetch_bucket(client, memory, on_bytes, *to_fetch.get_nowait())
                            continue
                        return
            except SlackwaterError as error:
                failures.append(error)

        missing_bytes = sum(size for _, size, _ in missing)
        count = min(self._streams, len(missing), missing_bytes // _WORTH_A_STREAM + 1)
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

    def _connection(self) -> RelayClient:
        """The manifest's connection, once, then another one."""
        with self._lock:
            connected, self._connected = self._connected, None
        return connected or self._connect()

    def _connect(self) -> RelayClient:
        client = RelayClient(
            self._address, self._secret, self._timeout_s, is_cancelled=lambda: self._cancelled
        )
        with self._lock:
            if not self._cancelled:
                self._clients.append(client)
                return client
        client.close()
        raise UnavailableError("the pull was cancelled")

    def _fetch_bucket(
        self,
        client: RelayClient,
        memory: Memory | None,
        on_bytes: OnBytes | None,
        key: BucketKey,
        size: int,
        tag: int,
    ) -> None:
        views = None if memory is None else memory[key.number]
        slot = self._store.begin_write(key, size, tag, views=views)
        if slot is None:
            return

        def on_progress(filled: int) -> None:
            if on_bytes is not None:
                on_bytes(key.number, slot.filled, filled)
            self._store.advance(slot, filled)

        try:
            client.get(
                key, slot.views, offset=slot.filled, node=self._node, on_progress=on_progress
            )
        finally:
            self._store.fail(slot)
