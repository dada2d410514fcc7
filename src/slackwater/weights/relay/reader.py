"""Fetches payloads from a relay into a store; buckets are readable while later ones arrive."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from slackwater.model.errors import NotFoundError, RefusedError, SlackwaterError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.weights.relay.bucket_store import BucketKey, BucketStore
from slackwater.weights.relay.client import Address, RelayClient
from slackwater.weights.relay.fetch import Memory, OnBytes, RelayFetch
from slackwater.weights.relay.manifest import Manifest

AGAIN_S = 0.05
T = TypeVar("T")
_LOOK_S = 0.5
_MEMORY_BYTES = 1 << 40  # no limit: buckets are received into the version's own memory


class RelayReader:
    """One relay's payloads, in a store of its own.

    `streams` connections carry a payload's buckets in parallel; `timeout_s` limits the relay's
    silence.
    """

    streams = min(4, os.cpu_count() or 1)  # more streams than processors gain nothing
    timeout_s = 30.0

    def __init__(self, relay: Address, secret: bytes, *, node: str) -> None:
        self.store = BucketStore(_MEMORY_BYTES)
        self.relay, self.secret, self.node = relay, secret, node
        self._control: RelayClient | None = None
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Close the connections; a running pull fails."""
        self._closed = True
        if self._control is not None:
            self._control.close()
        self.store.close_all()

    def manifest(self, version: str, wait_s: float = 0.0) -> Manifest:
        return self.ask(lambda client: client.manifest(version, wait_s))

    def fetch_payload(
        self,
        payload: Payload,
        manifest: Manifest,
        deadline_s: float,
        memory: Memory | None,
        on_bytes: OnBytes | None,
    ) -> None:
        """Fetch a payload into the store before `time.monotonic()` reaches `deadline_s`.

        Received bytes stay if the relay fails meanwhile. `memory` is the caller's, per bucket, to
        receive into. `on_bytes` is called with the ranges that arrive.
        """
        self.store.register(manifest)
        self.store.expect(payload, True)
        try:
            while True:
                try:
                    self.new_fetch(self.relay).run(payload, manifest, memory, on_bytes)
                    return
                except UnavailableError as error:
                    if self._closed or time.monotonic() > deadline_s:
                        why = f"version {payload.version!r} did not come in time: {error}"
                        raise UnavailableError(why) from None
                    time.sleep(AGAIN_S)
        finally:
            self.store.expect(payload, False)

    def ask(self, question: Callable[[RelayClient], T]) -> T:
        """Call the relay; a broken connection is opened again at the next call."""
        with self._lock:
            if self._closed:
                raise RefusedError("this reader is closed; make another to pull with")
            if self._control is None:
                self._control = RelayClient(self.relay, self.secret, self.timeout_s)
            try:
                return question(self._control)
            except UnavailableError:
                self._control.close()
                self._control = None
                raise

    def new_fetch(self, address: Address) -> RelayFetch:
        """A fetch into the store, over several connections."""
        return RelayFetch(
            self.store,
            address,
            self.secret,
            node=self.node,
            streams=self.streams,
            timeout_s=self.timeout_s,
        )


class PayloadReceipt:
    """Fetches one payload in a thread while the caller processes complete buckets."""

    def __init__(
        self,
        reader: RelayReader,
        payload: Payload,
        manifest: Manifest,
        deadline_s: float,
        memory: Memory | None,
        on_bytes: OnBytes | None,
    ) -> None:
        self._reader, self._payload = reader, payload
        self._error: SlackwaterError | None = None
        fetch = partial(reader.fetch_payload, payload, manifest, deadline_s, memory, on_bytes)
        self._thread = threading.Thread(
            target=self._run, args=(fetch,), name="weight pull", daemon=True
        )
        reader.store.expect(payload, True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the payload is complete; raises the fetch's error."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    @contextmanager
    def bucket(self, number: int) -> Iterator[tuple[memoryview, ...]]:
        """A complete bucket's memory inside the context."""
        store = self._reader.store
        while True:
            try:
                slot = store.open(BucketKey(self._payload, number), _LOOK_S)
                break
            except NotFoundError:
                self._raise_if_ended()
        try:
            while not slot.complete:
                try:
                    store.wait(slot, slot.size - 1, _LOOK_S)
                except UnavailableError:
                    self._raise_if_ended()
            yield slot.views
        finally:
            store.close(slot)

    def _raise_if_ended(self) -> None:
        if not self._thread.is_alive():
            self.finish()
            raise UnavailableError(
                f"version {self._payload.version!r} was dropped while it arrived"
            )

    def _run(self, fetch: Callable[[], None]) -> None:
        try:
            fetch()
        except SlackwaterError as error:
            self._error = error
