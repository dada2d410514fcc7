"""A node's relay: holds what its trainers publish, fetches from other nodes on command."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from slackwater.model.errors import SlackwaterError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.weights.relay.bucket_store import BucketKey, BucketStore
from slackwater.weights.relay.client import Address
from slackwater.weights.relay.fetch import RelayFetch
from slackwater.weights.relay.manifest import Manifest
from slackwater.weights.relay.peers import RelayOffers, RelayPeer
from slackwater.weights.relay.server import RelayServer
from slackwater.wire.certificate import PeerIdentity

_STREAMS = 4
_PATIENCE_S = 5.0  # a worker may request a payload before this relay is told to fetch it


@dataclass(frozen=True, slots=True)
class FetchOutcome:
    """The outcome of fetching a payload from `source`; complete if there is no error."""

    payload: Payload
    source: str
    error: str = ""


class NodeRelay:
    """Serves the node by shared memory, other nodes by encrypted TCP; `tell` gets every outcome."""

    def __init__(
        self,
        secret: bytes,
        node: str,
        host: str,
        max_bytes: int,
        *,
        tell: Callable[[FetchOutcome], None],
        timeout_s: float = 30.0,
    ) -> None:
        self.store = BucketStore(max_bytes, shared=True)
        self._node, self._tell = node, tell
        self._identity = PeerIdentity()
        self._offers = RelayOffers(self._identity)
        self._timeout_s = timeout_s
        self._server = RelayServer(self.store, secret, node=node, patience_s=_PATIENCE_S)
        self._peers = RelayServer(self.store, self._offers, host=host, patience_s=_PATIENCE_S)
        self.address = self._server.address  # for processes of this node
        self.peer_address = self._peers.address  # for other nodes
        self.certificate = self._identity.certificate  # by which they recognise this relay
        self._lock = threading.Lock()
        self._fetches: dict[Payload, RelayFetch] = {}

    def offer(self, payload: Payload, certificate: str) -> None:
        """Allow the node with this certificate to fetch a payload here."""
        self._offers.offer(payload, certificate)

    def fetch(self, payload: Payload, source: str, address: Address, certificate: str) -> None:
        """Fetch a payload from another node's relay in a thread; replaces an earlier fetch."""
        fetch = RelayFetch(
            self.store,
            address,
            RelayPeer(self._identity, certificate),
            node=self._node,
            streams=_STREAMS,
            timeout_s=self._timeout_s,
        )
        with self._lock:
            before = self._fetches.get(payload)
            self._fetches[payload] = fetch
        if before is not None:
            before.cancel()
        self.store.expect(payload, True)
        threading.Thread(
            target=self._run, args=(payload, source, fetch), name="weight fetch", daemon=True
        ).start()

    def drop(self, payload: Payload) -> None:
        """Drop a payload, and fail calls that wait for it."""
        self._offers.withdraw(payload)
        with self._lock:
            fetch = self._fetches.pop(payload, None)
        if fetch is not None:
            fetch.cancel()
        complete = payload in self.store.payloads()
        self.store.expect(payload, False)
        self.store.drop(payload)
        if not complete:
            self.store.mark_unavailable(payload.version)

    def drop_all(self) -> None:
        """Drop every payload that is here or being fetched."""
        with self._lock:
            fetching = tuple(self._fetches)
        for payload in {*fetching, *self.store.payloads()}:
            self.drop(payload)

    def close(self) -> None:
        """Stop serving and fetching, and free the memory."""
        with self._lock:
            fetches = list(self._fetches.values())
            self._fetches.clear()
        for fetch in fetches:
            fetch.cancel()
        self._server.close()
        self._peers.close()
        self.store.close_all()

    def _note(self, manifest: Manifest, base: str) -> None:
        """Register the manifest, with the payloads that this relay has or fetches."""
        with self._lock:
            here = {m.version: m.sizes for m in self.store.manifests()}
            sizes = here.get(manifest.version, {}) | {base: manifest.sizes[base]}
            self.store.register(msgspec.structs.replace(manifest, sizes=sizes))

    def _run(self, payload: Payload, source: str, fetch: RelayFetch) -> None:
        error = ""
        try:
            manifest = fetch.manifest(payload.version)
            sizes = manifest.sizes[payload.base]
            self._note(manifest, payload.base)
            fetch.run(payload, manifest)
            keys = [BucketKey(payload, number) for number in range(len(sizes))]
            if self.store.count_filled_bytes(keys) != list(sizes):
                raise UnavailableError("another fetch of it was still running")
        except (SlackwaterError, KeyError) as problem:
            error = str(problem) or type(problem).__name__
        with self._lock:
            if self._fetches.get(payload) is not fetch:
                return  # cancelled, or replaced by a fetch from another node
            if not error:
                del self._fetches[payload]
        if not error:
            self.store.expect(payload, False)
        self._tell(FetchOutcome(payload, source, error))
