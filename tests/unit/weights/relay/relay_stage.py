"""Small versions, relays and receivers for the relay's tests."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np

from harness.relay_members import ChoosingReceiver, RelayMember
from harness.relay_tracker import RelayTracker
from harness.shelf_target import ShelfTarget
from slackwater.weights.relay.bucket_store import BucketStore
from slackwater.weights.relay.manifest import Manifest, TensorEntry
from slackwater.weights.relay.publisher import HostVersion, publish
from slackwater.weights.relay.server import RelayServer

SECRET = b"the fleet's secret"
BUCKET = 1 << 16
TENSORS = (
    TensorEntry("a", "BF16", (300, 501)),
    TensorEntry("b", "F32", (7,)),
    TensorEntry("c", "I64", (3000,)),
    TensorEntry("d", "BF16", (0, 4)),
    TensorEntry("e", "F8_E4M3", (123_457,)),
)


def version(
    name: str, seed: int, share: float = 0.01, base: HostVersion | None = None
) -> HostVersion:
    """A version with random bytes; or one in which `share` of the base's bytes changed."""
    rng = np.random.default_rng(seed)
    arrays = []
    for number, tensor in enumerate(TENSORS):
        fresh = rng.integers(0, 256, tensor.size, np.uint8)
        if base is not None:
            old = base.arrays[number]
            fresh = np.where(rng.random(tensor.size) < share, fresh, old)
        arrays.append(fresh)
    return HostVersion(name, TENSORS, tuple(arrays), {"lora": None, "seed": seed})


def same(one: HostVersion, other: HostVersion) -> bool:
    return one.tensors == other.tensors and all(map(np.array_equal, one.arrays, other.arrays))


@dataclass
class Stage:
    """A relay with its members; closes everything."""

    max_bytes: int = 64 << 20
    shared: bool = False
    stack: ExitStack = field(default_factory=ExitStack)
    last: HostVersion | None = None

    def __post_init__(self) -> None:
        self.store = BucketStore(self.max_bytes, self.shared)
        self.tracker = RelayTracker("trainer node", "train")
        self.server = RelayServer(self.store, SECRET, node="trainer node")
        self.stack.callback(self.store.close_all)
        self.stack.callback(self.server.close)

    def publish(self, new: HostVersion) -> Manifest:
        manifest = publish(ShelfTarget(self.store), new, self.last, BUCKET)
        self.last = new
        return manifest

    def agent(
        self,
        name: str,
        site: str = "rollout",
        node: str = "",
        relay: tuple[str, int] | None = None,
        max_bytes: int = 64 << 20,
        streams: int = 2,
    ) -> RelayMember:
        agent = RelayMember(
            relay or self.server.address,
            SECRET,
            name,
            self.tracker,
            node=node or f"node of {name}",
            site=site,
            max_bytes=max_bytes,
            streams=streams,
            timeout_s=20.0,
        )
        self.stack.callback(agent.close)
        return agent

    def receiver(self, name: str, site: str = "rollout") -> ChoosingReceiver:
        return ChoosingReceiver(self.agent(name, site))


class CuttingProxy:
    """Passes bytes on to a relay, and cuts the first `cuts` connections after `after` bytes of
    answers.
    """

    def __init__(self, target: tuple[str, int], after: int, cuts: int) -> None:
        self._target, self._after, self._cuts = target, after, cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.cut = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._target)
                threading.Thread(target=self._copy, args=(here, there, False), daemon=True).start()
                threading.Thread(target=self._copy, args=(there, here, True), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 14):
                passed += len(data)
                if answers and passed > self._after:
                    with self._lock:
                        cutting = self.cut < self._cuts
                        self.cut += cutting
                    if cutting:
                        break
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def stage(**settings: object) -> Iterator[Stage]:
    """For a fixture."""
    made = Stage(**settings)  # type: ignore[arg-type]
    with made.stack:
        yield made
