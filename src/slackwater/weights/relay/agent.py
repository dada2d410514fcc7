"""A receiver: fetches payloads from the sources that the relay chooses and serves neighbours."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from slackwater.model.errors import NotFoundError, RefusedError, SlackwaterError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.weights.relay import protocol as say
from slackwater.weights.relay.bucket_store import BucketKey, BucketStore
from slackwater.weights.relay.client import Address, RelayClient
from slackwater.weights.relay.fetch import Memory as Memory
from slackwater.weights.relay.fetch import RelayFetch
from slackwater.weights.relay.fetch import Seen as Seen
from slackwater.weights.relay.manifest import Manifest
from slackwater.weights.relay.server import RelayServer

logger = logging.getLogger(__name__)

STREAMS = min(4, max(os.cpu_count() or 1, 1))  # more than there are processors take turns
_AGAIN_S = 0.05
T = TypeVar("T")
_LOOK_S = 0.5


class Agent:
    """One member of a relay; every payload crosses each link once, as the relay's policy says.

    `streams` connections carry a payload's buckets in parallel; `timeout_s` limits a peer's
    silence. Without `serve` (an engine) everything comes from the relay itself.
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
        streams: int = STREAMS,
        timeout_s: float = 30.0,
        serve: bool = True,
    ) -> None:
        self.member = member
        self.shelf = BucketStore(max_bytes)
        self._relay, self._secret, self._node, self._site = relay, secret, node, site
        self._streams, self._timeout_s = streams, timeout_s
        self._server: RelayServer | None = None
        if serve:
            self._server = RelayServer(self.shelf, secret, host=host, node=node, member=member)
        self._control: RelayClient | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.received_bytes: dict[str, int] = {}  # by source; "" is the relay itself

    def close(self) -> None:
        """Leave and stop serving; a running pull fails."""
        self._closed = True
        if self._server is not None:
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
            if self._server is not None:
                host, port = self._server.address
                client.join(say.JoinRelay(self.member, host, port, self._node, self._site))
                client.have(self.member, self.shelf.payloads())
            self._control = client
        return self._control

    def manifest(self, version: str, wait_s: float = 0.0) -> Manifest:
        """A version's manifest, from the relay."""
        return self._asked(lambda client: client.manifest(version, wait_s))

    def versions(self) -> list[say.VersionListing]:
        """The relay's visible versions."""
        return self._asked(lambda client: client.versions())

    def bring(
        self,
        payload: Payload,
        manifest: Manifest,
        deadline_s: float,
        memory: Memory | None = None,
        seen: Seen | None = None,
    ) -> None:
        """Have all of a payload in the store before `time.monotonic()` reaches `deadline_s`.

        A failing source is replaced and what has arrived stays. `memory` is the caller's, per
        bucket, to receive into; it is served too, so it must not change. `seen` is told of arriving
        bytes.
        """
        self.shelf.note(manifest)
        self.shelf.expect(payload, True)
        try:
            self._bring(payload, manifest, deadline_s, memory, seen)
        finally:
            self.shelf.expect(payload, False)

    def _bring(
        self,
        payload: Payload,
        manifest: Manifest,
        deadline_s: float,
        memory: Memory | None,
        seen: Seen | None,
    ) -> None:
        lost, trouble = "", ""
        source: say.SourceChoice | None = None
        while True:
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"version {payload.version!r} did not come in time: "
                    f"{trouble or 'all who have it are busy'}"
                )
            try:
                source = self._asked(partial(_source, self.member, payload, lost))
                if source is None:
                    threading.Event().wait(_AGAIN_S)
                    continue
                address = (source.host, source.port) if source.member else self._relay
                self._fetch(address, source.member, payload, manifest, memory, seen)
                self._asked(lambda client: client.have(self.member, [payload]))
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
        payload: Payload,
        manifest: Manifest,
        memory: Memory | None,
        seen: Seen | None,
    ) -> None:
        """Fill every bucket that is not complete, over several connections."""
        fetch = RelayFetch(
            self.shelf,
            address,
            self._secret,
            member=source,
            node=self._node,
            streams=self._streams,
            timeout_s=self._timeout_s,
        )
        try:
            fetch.run(payload, manifest, memory, seen)
        finally:
            came = self.received_bytes.get(source, 0) + fetch.received_bytes
            self.received_bytes[source] = came


def _source(
    member: str, payload: Payload, lost: str, client: RelayClient
) -> say.SourceChoice | None:
    return client.source(member, payload, lost)


class PayloadReceipt:
    """Fetches one payload in a thread while the caller works on complete buckets."""

    def __init__(
        self,
        agent: Agent,
        payload: Payload,
        manifest: Manifest,
        deadline_s: float,
        memory: Memory | None = None,
        seen: Seen | None = None,
    ) -> None:
        self._agent, self._payload, self._manifest = agent, payload, manifest
        self._memory, self._seen = memory, seen
        self._deadline_s = deadline_s
        self._error: SlackwaterError | None = None
        self._thread = threading.Thread(target=self._run, name="weight pull", daemon=True)
        agent.shelf.expect(payload, True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until it has all come; its error is raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    @contextmanager
    def bucket(self, number: int) -> Iterator[tuple[memoryview, ...]]:
        """A complete bucket's memory inside the context."""
        shelf = self._agent.shelf
        while True:
            try:
                slot = shelf.open(BucketKey(self._payload, number), _LOOK_S)
                break
            except NotFoundError:
                self._raise_if_ended()
        try:
            while not slot.complete:
                try:
                    shelf.wait(slot, slot.size - 1, _LOOK_S)
                except UnavailableError:
                    self._raise_if_ended()
            yield slot.views
        finally:
            shelf.close(slot)

    def _raise_if_ended(self) -> None:
        if not self._thread.is_alive():
            self.finish()
            raise UnavailableError(f"version {self._payload.version!r} was dropped while it came")

    def _run(self) -> None:
        try:
            how = (self._deadline_s, self._memory, self._seen)
            self._agent.bring(self._payload, self._manifest, *how)
        except SlackwaterError as error:
            self._error = error
