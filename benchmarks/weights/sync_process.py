"""One process of `slackwater bench sync`, in its own network namespace: a sender or a receiver,
told what to do by lines on stdin.

Run as `python -m benchmarks.weights.sync_process ROLE JSON`; it answers each line with one JSON
line.
"""

import hashlib
import json
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from benchmarks.weights.delta import bf16_weights, changed
from benchmarks.weights.simulated.flat_source import FlatSource
from harness.relay_members import (
    ChoosingReceiver,
    RelayMember,
    find_tracker,
    serve_tracker,
)
from harness.relay_tracker import RelayTracker
from harness.shelf_target import ShelfTarget
from slackwater.model.errors import UnavailableError
from slackwater.model.payload import Payload
from slackwater.policy.weights.source import TreeSource
from slackwater.weights.relay.bucket_store import BucketStore
from slackwater.weights.relay.manifest import TensorEntry
from slackwater.weights.relay.publisher import HostVersion, publish
from slackwater.weights.relay.server import RelayServer

_TENSOR = 1 << 24  # elements of each tensor
_WITHIN_S = 900.0


def _first(size: int, seed: int) -> HostVersion:
    """A model of `size` bytes of bf16."""
    count = max(size // (2 * _TENSOR), 1)
    elements = size // 2 // count
    rng = np.random.default_rng(seed)
    block = bf16_weights(min(elements, 1 << 22), rng)
    arrays, entries = [], []
    for number in range(count):
        entries.append(TensorEntry(f"layers.{number:04}.weight", "BF16", (elements,)))
        mixed = np.resize(block, elements)
        mixed ^= np.uint16(number & 7)  # no two alike
        arrays.append(mixed.view(np.uint8))
    return HostVersion("v0", tuple(entries), tuple(arrays), {})


def _next(old: HostVersion, share: float, seed: int) -> HostVersion:
    rng = np.random.default_rng(seed)
    arrays = tuple(
        changed(array.view(np.uint16), share, "scattered", rng).view(np.uint8)
        for array in old.arrays
    )
    return HostVersion("v1", old.tensors, arrays, {})


def _touched(size: int) -> dict[str, Any]:
    """Have the machine under a virtual one give it this much memory, and leave it free again.

    Some take back what is free for a second or two. Whoever is timed next would pay for getting it
    again, several times what receiving costs; who that is depends on how long a process takes to
    start.
    """
    memory = np.empty(size, np.uint8)
    memory[::4096] = 1
    return {}


def _digest(version: HostVersion) -> str:
    found = hashlib.blake2b(digest_size=16)
    for array in version.arrays:
        found.update(array.data)
    return found.hexdigest()


class _Sender:
    """The trainer's side: a relay beside it."""

    def __init__(self, host: str, secret: str, size: int, seed: int, flat: bool) -> None:
        self._shelf = BucketStore(max_bytes=4 * size + (64 << 20))
        policy = FlatSource() if flat else TreeSource()
        tracker = RelayTracker("sender", "train", policy)
        self._server = RelayServer(self._shelf, secret.encode(), host=host, node="sender")
        self._tracker = serve_tracker(tracker, host, secret.encode())
        self._version = _first(size, seed)
        self._seed = seed
        publish(ShelfTarget(self._shelf), self._version)

    def ready(self) -> dict[str, Any]:
        relay = {"address": self._server.address, "tracker": self._tracker}
        return {"relay": relay, "digest": _digest(self._version)}

    def cpu(self) -> dict[str, Any]:
        """How long this process has had a processor."""
        return {"cpu_s": time.process_time()}

    def next(self, share: float) -> dict[str, Any]:
        """Publish the next version; how long the encoding and the sealing took."""
        new = _next(self._version, share, self._seed + 1)
        began_s = time.perf_counter()
        manifest = publish(ShelfTarget(self._shelf), new, self._version)
        took_s = time.perf_counter() - began_s
        self._shelf.drop(Payload("v0"))
        self._version = new
        return {
            "digest": _digest(new),
            "publish_s": took_s,
            "delta_bytes": manifest.bytes_of("v0"),
        }


class _Receiver:
    def __init__(
        self, host: str, secret: str, size: int, relay: dict[str, Any], name: str, site: str
    ) -> None:
        tracker = find_tracker(tuple(relay["tracker"]), secret.encode(), _WITHIN_S)
        self._agent = RelayMember(
            tuple(relay["address"]), secret.encode(), name, tracker, node=name, site=site,
            max_bytes=2 * size + (64 << 20), host=host,
        )  # fmt: skip
        self._size = size
        self._receiver = ChoosingReceiver(self._agent)
        with suppress(UnavailableError):  # a link that is down; a pull connects again
            self._agent.versions()
        self._warm()

    def _warm(self) -> None:
        """Load compiled code before the clock runs."""
        from slackwater.weights.delta.apply import apply
        from slackwater.weights.delta.encode import encode

        old = np.zeros(1 << 17, np.uint16)
        new = old.copy()
        new[::100] = 1
        apply(old, encode(old, new), None)

    def ready(self) -> dict[str, Any]:
        return {}

    def touch(self) -> dict[str, Any]:
        return _touched(self._size)

    def pull(self, version: str) -> dict[str, Any]:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        found = self._receiver.pull(version, _WITHIN_S)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        self._agent.received_bytes, received = {}, self._agent.received_bytes
        told = {"took_s": took_s, "cpu_s": cpu_s, "received": received}
        return told | {"digest": _digest(found)}

    def forget_payload(self, version: str) -> dict[str, Any]:
        self._agent.store.drop(Payload(version))
        return {}


class _PlainSender:
    """The peer to compare with: one socket, one `sendall`."""

    def __init__(self, host: str, size: int) -> None:
        self._listener = socket.create_server((host, 0))
        self._data = np.random.default_rng(0).integers(0, 256, size, np.uint8)

    def ready(self) -> dict[str, Any]:
        return {"address": self._listener.getsockname()[:2]}

    def send(self) -> dict[str, Any]:
        began_cpu_s = time.process_time()
        connection, _ = self._listener.accept()
        with connection:
            connection.sendall(self._data.data)
        return {"cpu_s": time.process_time() - began_cpu_s}


class _PlainReceiver:
    """The peer's other end: into memory that is new each time, as a version's is."""

    def __init__(self, relay: list[Any], size: int) -> None:
        self._address, self._size = (relay[0], relay[1]), size

    def ready(self) -> dict[str, Any]:
        return {}

    def touch(self) -> dict[str, Any]:
        return _touched(self._size)

    def take(self) -> dict[str, Any]:
        began_s, began_cpu_s, got = time.perf_counter(), time.process_time(), 0
        memory = np.empty(self._size, np.uint8).data
        with socket.create_connection(self._address) as connection:
            while got < len(memory):
                got += connection.recv_into(memory[got:])
        cpu_s = time.process_time() - began_cpu_s
        return {"took_s": time.perf_counter() - began_s, "cpu_s": cpu_s}


ROLES: dict[str, Callable[..., Any]] = {
    "sender": _Sender,
    "receiver": _Receiver,
    "plain_sender": _PlainSender,
    "plain_receiver": _PlainReceiver,
}


def main() -> None:
    actor = ROLES[sys.argv[1]](**json.loads(sys.stdin.readline()))
    sys.stdout.write(json.dumps(actor.ready()) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(actor, name)(*arguments)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
