"""A receiver's end: brings cargoes to its own shelf, from whom the relay says, and serves them to its neighbours."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from slackwater.model.errors import (
    NotFoundError,
    RefusedError,
    SlackwaterError,
    UnavailableError,
)
from slackwater.weights.relay import protocol as say
from slackwater.weights.relay.bucket import Cargo, Manifest, tag_of
from slackwater.weights.relay.client import Address, RelayClient
from slackwater.weights.relay.server import RelayServer
from slackwater.weights.relay.shelf import Key, Shelf, Slot

logger = logging.getLogger(__name__)

_AGAIN_S = 0.05
T = TypeVar("T")
Memory = Sequence[tuple[memoryview, ...]]  # a bucket's pieces, by its number


class Agent:
    """One member of a relay. Everything is taken once over whichever link the relay's policy says.

    `streams` connections carry a cargo's buckets side by side; `timeout_s` is how long a peer may be silent.
    """

    def __init__(
        self,
        relay: Address,
        secret: bytes,
        member: str,
        *,
        node: str,
        site: str,
        max_bytes: int,
        host: str = "127.0.0.1",
        streams: int = 4,
        timeout_s: float = 30.0,
    ) -> None:
        self.member = member
        self.shelf = Shelf(max_bytes)
        self._relay, self._secret, self._node, self._site = relay, secret, node, site
        self._streams, self._timeout_s = streams, timeout_s
        self._server = RelayServer(self.shelf, secret, host=host, node=node, member=member)
        self._control: RelayClient | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.received_bytes: dict[str, int] = {}  # by source; "" is the relay itself

    def close(self) -> None:
        """Leave, and stop serving; a pull under way ends with an error."""
        self._closed = True
        self._server.close()
        if self._control is not None:
            self._control.close()
        self.shelf.close_all()

    def control(self) -> RelayClient:
        """The connection that makes this a member; opened again when it broke."""
        if self._closed:
            raise RefusedError(f"member {self.member!r} has left; make another to pull with")
        if self._control is None:
            client = RelayClient(self._relay, self._secret, self._timeout_s)
            host, port = self._server.address
            client.join(say.Join(self.member, host, port, self._node, self._site))
            client.have(self.member, self.shelf.cargoes())
            self._control = client
        return self._control

    def manifest(self, version: str, wait_s: float = 0.0) -> Manifest:
        """A version's manifest, from the relay."""
        return self._asked(lambda client: client.manifest(version, wait_s))

    def versions(self) -> list[say.Line]:
        """The relay's visible versions."""
        return self._asked(lambda client: client.versions())

    def bring(
        self, cargo: Cargo, manifest: Manifest, deadline_s: float, memory: Memory | None = None
    ) -> None:
        """Have all of a cargo on the shelf before `time.monotonic()` is `deadline_s`.

        A source that breaks off is left for another, and what has come stays. `memory` is the caller's, bucket by
        bucket, to receive into; it is served from as well, so it must not be changed.
        """
        self.shelf.note(manifest)
        self.shelf.expect(cargo, True)
        try:
            self._bring(cargo, manifest, deadline_s, memory)
        finally:
            self.shelf.expect(cargo, False)

    def _bring(
        self, cargo: Cargo, manifest: Manifest, deadline_s: float, memory: Memory | None
    ) -> None:
        lost, trouble = "", ""
        source: say.From | None = None
        while True:
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"version {cargo.version!r} did not come in time: {trouble or 'all who have it are busy'}"
                )
            try:
                source = self._asked(partial(_source, self.member, cargo, lost))
                if source is None:
                    threading.Event().wait(_AGAIN_S)
                    continue
                address = (source.host, source.port) if source.member else self._relay
                self._fetch(address, source.member, cargo, manifest, memory)
                self._asked(lambda client: client.have(self.member, [cargo]))
            except (NotFoundError, UnavailableError) as error:
                trouble, lost = str(error), ""
                if source is not None and source.member:
                    lost = source.member  # a peer; the relay itself is always worth another try
                elif isinstance(error, NotFoundError):
                    raise
                else:
                    threading.Event().wait(_AGAIN_S)
                logger.debug("pull goes on elsewhere member=%s: %s", self.member, error)
            else:
                return

    def _asked(self, question: Callable[[RelayClient], T]) -> T:
        with self._lock:
            try:
                return question(self.control())
            except UnavailableError:
                if self._control is not None:
                    self._control.close()
                    self._control = None
                raise

    def _fetch(
        self,
        address: Address,
        source: str,
        cargo: Cargo,
        manifest: Manifest,
        memory: Memory | None,
    ) -> None:
        """Fill every bucket that is not complete, over several connections."""
        waiting: queue.SimpleQueue[tuple[Key, int, int]] = queue.SimpleQueue()
        sizes = manifest.sizes[cargo.base]
        keys = [Key(cargo, number) for number in range(len(sizes))]
        tags = [tag_of(sums) for sums in manifest.checksums]
        filled = self.shelf.filled(keys)
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
                with RelayClient(address, self._secret, self._timeout_s) as client:
                    while not failures:
                        with suppress(queue.Empty):
                            self._take(client, source, memory, *waiting.get_nowait())
                            continue
                        return
            except SlackwaterError as error:
                failures.append(error)

        count = min(self._streams, len(missing))
        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _take(
        self,
        client: RelayClient,
        source: str,
        memory: Memory | None,
        key: Key,
        size: int,
        tag: int,
    ) -> None:
        views = None if memory is None else memory[key.number]
        slot = self.shelf.begin(key, size, tag, views=views)
        if slot is None:
            return
        start = slot.filled
        try:
            client.get(
                key,
                slot.views,
                offset=start,
                node=self._node,
                member=source,
                arrived=partial(self.shelf.advance, slot),
            )
        finally:
            self._count(source, slot, start)
            self.shelf.fail(slot)

    def _count(self, source: str, slot: Slot, start: int) -> None:
        with self._lock:
            came = slot.filled - start
            self.received_bytes[source] = self.received_bytes.get(source, 0) + came


def _source(member: str, cargo: Cargo, lost: str, client: RelayClient) -> say.From | None:
    return client.source(member, cargo, lost)
