"""A node's relay: what the node's trainers published and its engines pull, brought from other nodes as it is told to."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from slackwater.model.cargo import Cargo
from slackwater.model.errors import SlackwaterError, UnavailableError
from slackwater.weights.relay.client import Address
from slackwater.weights.relay.fetch import Fetch
from slackwater.weights.relay.manifest import Manifest
from slackwater.weights.relay.server import RelayServer
from slackwater.weights.relay.shelf import Key, Shelf

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # a worker may ask for a cargo before this relay has heard that it is to come


@dataclass(frozen=True, slots=True)
class Brought:
    """How bringing a cargo from `source` ended; without an error it is all here."""

    cargo: Cargo
    source: str
    error: str = ""


def _nobody(brought: Brought) -> None:
    logger.debug("nobody hears of %s", brought)


class NodeRelay:
    """Shared memory on the node, TCP with several streams to others. `tell` hears how every bringing ended, from its thread."""

    def __init__(
        self,
        secret: bytes,
        node: str,
        host: str,
        max_bytes: int,
        *,
        tell: Callable[[Brought], None] = _nobody,
        shared: bool = True,
        streams: int = 4,
        timeout_s: float = 30.0,
    ) -> None:
        self.shelf = Shelf(max_bytes, shared)
        self._secret, self._node, self.tell = secret, node, tell
        self._streams, self._timeout_s = streams, timeout_s
        self._server = RelayServer(self.shelf, secret, host=host, node=node, patience_s=_PATIENCE_S)
        self._lock = threading.Lock()
        self._fetches: dict[Cargo, Fetch] = {}

    @property
    def address(self) -> Address:
        return self._server.address

    def bring(self, cargo: Cargo, source: str, address: Address) -> None:
        """Take a cargo from another node's relay, in a thread; one that takes it from elsewhere stops."""
        fetch = Fetch(
            *(self.shelf, address, self._secret),
            node=self._node,
            streams=self._streams,
            timeout_s=self._timeout_s,
        )
        with self._lock:
            before = self._fetches.get(cargo)
            self._fetches[cargo] = fetch
        if before is not None:
            before.cancel()
        self.shelf.expect(cargo, True)
        threading.Thread(
            target=self._run, args=(cargo, source, fetch), name="weight bringing", daemon=True
        ).start()

    def drop(self, cargo: Cargo) -> None:
        """Forget a cargo; nobody need wait for it here."""
        with self._lock:
            fetch = self._fetches.pop(cargo, None)
        if fetch is not None:
            fetch.cancel()
        came = cargo in self.shelf.cargoes()
        self.shelf.expect(cargo, False)
        self.shelf.drop(cargo)
        if not came:
            self.shelf.give_up(cargo.version)

    def close(self) -> None:
        """Stop serving and bringing, and give the memory back."""
        with self._lock:
            fetches = list(self._fetches.values())
            self._fetches.clear()
        for fetch in fetches:
            fetch.cancel()
        self._server.close()
        self.shelf.close_all()

    def _note(self, manifest: Manifest, base: str) -> None:
        """Know of a version, as far as this relay has it or will."""
        with self._lock:
            here = {m.version: m.sizes for m in self.shelf.manifests()}
            sizes = here.get(manifest.version, {}) | {base: manifest.sizes[base]}
            self.shelf.note(msgspec.structs.replace(manifest, sizes=sizes))

    def _run(self, cargo: Cargo, source: str, fetch: Fetch) -> None:
        error = ""
        try:
            manifest = fetch.manifest(cargo.version)
            sizes = manifest.sizes[cargo.base]
            self._note(manifest, cargo.base)
            fetch.run(cargo, manifest)
            keys = [Key(cargo, number) for number in range(len(sizes))]
            if self.shelf.filled(keys) != list(sizes):
                raise UnavailableError("another bringing of it was still under way")
        except (SlackwaterError, KeyError) as problem:
            error = str(problem) or type(problem).__name__
        with self._lock:
            if self._fetches.get(cargo) is not fetch:
                return  # called off, or sent elsewhere
            if not error:
                del self._fetches[cargo]
        if not error:
            self.shelf.expect(cargo, False)
        self.tell(Brought(cargo, source, error))
