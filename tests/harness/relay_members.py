"""Receivers that choose their way themselves and serve each other: what a relay is held against.

In a service the weight director chooses routes and sources; here a tracker does, which members of
other processes reach through `TrackerManager`.
"""

import threading
import time
from multiprocessing.managers import BaseManager

from harness.relay_tracker import JoinedMember, RelayTracker
from slackwater.model.errors import NotFoundError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.policy.weights.pull_route import Delta, PullRoute, PullRoutePolicy
from slackwater.weights.relay import protocol
from slackwater.weights.relay.bucket import Bytes
from slackwater.weights.relay.bucket_store import BucketStore
from slackwater.weights.relay.client import Address
from slackwater.weights.relay.fetch import Memory, OnBytes
from slackwater.weights.relay.manifest import Manifest
from slackwater.weights.relay.publisher import HostVersion
from slackwater.weights.relay.reader import AGAIN_S, RelayReader
from slackwater.weights.relay.receiver import DamagedDeltaError, Receiver
from slackwater.weights.relay.server import RelayServer


class TrackerManager(BaseManager):
    """Gives other processes a tracker, by `tracker()`."""


TrackerManager.register("tracker")


def serve_tracker(tracker: RelayTracker, host: str, secret: bytes) -> Address:
    """Listen for members of other processes for as long as this one lives; the address."""

    class Server(BaseManager):
        pass

    Server.register("tracker", callable=lambda: tracker)
    server = Server((host, 0), secret).get_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address: Address = server.address  # type: ignore[assignment]
    return address


def find_tracker(address: Address, secret: bytes, within_s: float) -> RelayTracker:
    """The tracker of another process; insists while the link to it is down."""
    manager, deadline_s = TrackerManager(address, secret), time.monotonic() + within_s
    while True:
        try:
            manager.connect()
            found: RelayTracker = manager.tracker()  # type: ignore[attr-defined]
            return found
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(AGAIN_S)


class RelayMember(RelayReader):
    """A reader that serves what it has; every payload crosses each link once."""

    def __init__(
        self,
        relay: Address,
        secret: bytes,
        member: str,
        tracker: RelayTracker,
        *,
        node: str,
        site: str,
        max_bytes: int,
        host: str = "127.0.0.1",
        streams: int = RelayReader.streams,
        timeout_s: float = RelayReader.timeout_s,
    ) -> None:
        super().__init__(relay, secret, node=node)
        self.store = BucketStore(max_bytes)
        self.streams, self.timeout_s = streams, timeout_s
        self.member, self._tracker = member, tracker
        self._server = RelayServer(self.store, secret, host=host, node=node)
        self._joined = JoinedMember(member, *self._server.address, node, site)
        self.received_bytes: dict[str, int] = {}  # by source; "" is the relay itself

    def close(self) -> None:
        """Leave and stop serving; a running pull fails."""
        self._server.close()
        self._tracker.leave(self._joined)
        super().close()

    def versions(self) -> list[protocol.VersionListing]:
        """The relay's visible versions."""
        return self.ask(lambda client: client.versions())

    def fetch_payload(
        self,
        payload: Payload,
        manifest: Manifest,
        deadline_s: float,
        memory: Memory | None,
        on_bytes: OnBytes | None,
    ) -> None:
        """From the sources that the tracker names; a failing one is replaced, what came stays."""
        self.store.register(manifest)
        self.store.expect(payload, True)
        try:
            self._fetch_from_sources(payload, manifest, deadline_s, memory, on_bytes)
        finally:
            self.store.expect(payload, False)

    def _fetch_from_sources(
        self,
        payload: Payload,
        manifest: Manifest,
        deadline_s: float,
        memory: Memory | None,
        on_bytes: OnBytes | None,
    ) -> None:
        lost, trouble = "", "all who have it are busy"
        while time.monotonic() <= deadline_s and not self._closed:
            source = self._tracker.source(self._joined, payload, lost)
            if source is None:
                time.sleep(AGAIN_S)
                continue
            fetch = self.new_fetch((source.host, source.port) if source.member else self.relay)
            received: list[int] = []  # several threads append

            def count(bucket: int, start: int, stop: int, received: list[int] = received) -> None:
                received.append(stop - start)
                if on_bytes is not None:
                    on_bytes(bucket, start, stop)

            try:
                fetch.run(payload, manifest, memory, count)
            except (NotFoundError, UnavailableError) as error:
                trouble, lost = str(error), source.member
                if not lost and isinstance(error, NotFoundError):
                    raise
                if not lost:  # the relay itself is always worth another try
                    time.sleep(AGAIN_S)
            else:
                self._tracker.have(self._joined, payload)
                return
            finally:
                came = self.received_bytes.get(source.member, 0) + sum(received)
                self.received_bytes[source.member] = came
        raise UnavailableError(f"version {payload.version!r} did not come in time: {trouble}")


class ChoosingReceiver(Receiver):
    """Pulls versions whole or by deltas, whichever is smaller."""

    def __init__(self, member: RelayMember) -> None:
        super().__init__(member)
        self._member = member
        self.last_way: PullRoute | None = None

    def held(self) -> tuple[str, ...]:
        """The versions in host memory."""
        return tuple(self._kept_versions)

    def pull(self, version: str, within_s: float = 600.0) -> HostVersion:
        """The version, exactly as published; waits until it is visible. Errors change nothing."""
        if version in self._kept_versions:
            return self._kept_versions[version][0]
        deadline_s = time.monotonic() + within_s
        manifest = self._wait_for_manifest(version, deadline_s)
        refusals: set[Payload] = set()
        while True:
            way = self._chosen(version, refusals, deadline_s)
            self.last_way = way
            payloads = [Payload(way.start)] if way.fetch_start else []
            payloads += [Payload(delta.version, delta.base) for delta in way.deltas]
            try:
                found = self._pull_route(payloads, manifest, deadline_s)
            except DamagedDeltaError as error:
                refusals.add(error.payload)
                continue
            self._keep_newest(found, manifest)
            return found

    def _take_base(self, version: str) -> tuple[Bytes, ...]:
        """A payload that is still served to other members must not change."""
        for payload in [each for each in self._payloads if each.version == version]:
            self._reader.store.drop(payload)
            self._payloads.remove(payload)
        return super()._take_base(version)

    def _chosen(self, version: str, refusals: set[Payload], deadline_s: float) -> PullRoute:
        lines = self._retry(self._member.versions, deadline_s)
        usable = [
            (line.version, base, size)
            for line in lines
            for base, size in line.sizes.items()
            if Payload(line.version, base) not in refusals
        ]
        wholes = {name: size for name, base, size in usable if not base}
        deltas = [Delta(base, name, size) for name, base, size in usable if base]
        way = PullRoutePolicy().choose(version, self._kept_versions, wholes, deltas)
        if way is None:
            raise NotFoundError(f"version: nothing that the relay has leads to {version!r}")
        return way

    def _keep_newest(self, found: HostVersion, manifest: Manifest) -> None:
        self._kept_versions[found.version] = (found, manifest)
        while len(self._kept_versions) > self._keep:
            self._kept_versions.popitem(last=False)
        for payload in [c for c in self._payloads if c.version not in self._kept_versions]:
            self._reader.store.drop(payload)
            self._payloads.remove(payload)
