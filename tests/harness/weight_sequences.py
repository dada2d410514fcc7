"""Random sequences of publishes, joins, kills and restarts, by seed, over real sockets.

After each sequence every receiver that lives must hold the newest version to the bit, or say why
not; a version that a receiver was given and that is not as published is torn.
"""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from harness.relay_members import ChoosingReceiver, RelayMember
from harness.relay_tracker import RelayTracker
from slackwater.model.errors import RefusedError, SlackwaterError
from slackwater.model.payload import Payload
from slackwater.weights.relay.bucket import part_checksums, whole_views
from slackwater.weights.relay.bucket_store import BucketKey, BucketStore
from slackwater.weights.relay.client import RelayClient
from slackwater.weights.relay.manifest import TensorEntry, buckets_of, tag_of
from slackwater.weights.relay.publisher import HostVersion, publish
from slackwater.weights.relay.server import RelayServer

_SECRET = b"of this measurement"
_BUCKET = 1 << 15
_MAX_BYTES = 16 << 20
_TENSORS = (TensorEntry("a", "BF16", (50_000,)), TensorEntry("b", "F32", (999, 3)))
_WITHIN_S = 30.0


@dataclass(slots=True)
class Outcome:
    """What became of sequences: pulls that ended well, with an error, torn; receivers that missed
    the newest version.
    """

    pulls: int = 0
    errors: int = 0
    torn: int = 0
    behind: int = 0
    above_bound: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


class _Sequence:
    def __init__(self, seed: int, outcome: Outcome) -> None:
        self.rng = np.random.default_rng(seed)
        self.outcome = outcome
        self.lock = threading.Lock()
        self.truth: dict[str, HostVersion] = {}
        self.newest: HostVersion | None = None
        self.receivers: dict[str, tuple[RelayMember, ChoosingReceiver]] = {}
        self.threads: list[threading.Thread] = []
        self.joined = 0
        self.address = ("127.0.0.1", 0)
        self.tracker = RelayTracker("trainer", "train")
        self.store, self.server = self._relay()

    def _relay(self) -> tuple[BucketStore, RelayServer]:
        store = BucketStore(_MAX_BYTES)
        host, port = self.address
        self.tracker.clear()
        server = RelayServer(store, _SECRET, host=host, port=port, node="trainer")
        self.address = server.address
        return store, server

    def version(self) -> HostVersion:
        name, old = f"v{len(self.truth)}", self.newest
        arrays = []
        for number, tensor in enumerate(_TENSORS):
            fresh = self.rng.integers(0, 256, tensor.size, np.uint8)
            if old is not None and self.rng.random() < 0.8:
                mask = self.rng.random(tensor.size) < 0.02
                fresh = np.where(mask, fresh, old.arrays[number])
            arrays.append(fresh)
        return HostVersion(name, _TENSORS, tuple(arrays), {})

    def publish(self) -> None:
        new = self.version()
        self.truth[new.version] = new
        until_s = time.monotonic() + _WITHIN_S
        while not self._is_published(new) and time.monotonic() < until_s:
            time.sleep(0.01)  # the relay has yet to hear that the version's last sender died
        with RelayClient(self.address, _SECRET, _WITHIN_S) as client:
            self.newest = new
            for line in client.versions()[:-3]:
                for base in line.sizes:
                    client.drop(Payload(line.version, base))

    def _is_published(self, new: HostVersion) -> bool:
        try:
            with RelayClient(self.address, _SECRET, _WITHIN_S) as client:
                publish(client, new, self.newest, _BUCKET)
        except RefusedError:
            return False
        return True

    def die_publishing(self) -> None:
        """A sender that is killed between two buckets, or in the middle of one; its version is
        never sealed.
        """
        new = self.version()
        buckets = buckets_of(_TENSORS, _BUCKET)
        last = int(self.rng.integers(len(buckets)))
        with RelayClient(self.address, _SECRET, _WITHIN_S) as client, suppress(SlackwaterError):
            for number, bucket in enumerate(buckets[: last + 1]):
                views = whole_views(new.arrays, bucket)
                size = sum(map(len, views))
                if number == last:
                    views = [view[: len(view) // 2] for view in views]
                    threading.Timer(0.02, client.close).start()
                tag = tag_of(part_checksums(new.arrays, bucket))
                client.put(BucketKey(Payload(new.version), number), size, tag, views)

    def join(self) -> None:
        name = f"r{self.joined}"
        self.joined += 1
        site = f"site {int(self.rng.integers(2))}"
        agent = RelayMember(
            self.address, _SECRET, name, self.tracker, node=name, site=site, max_bytes=_MAX_BYTES,
            streams=2, timeout_s=_WITHIN_S,
        )  # fmt: skip
        self.receivers[name] = (agent, ChoosingReceiver(agent))

    def pull_all(self) -> None:
        """Every receiver begins to pull the newest version, beside whatever happens next."""
        if self.newest is None:
            return
        for agent, receiver in self.receivers.values():
            if not any(thread.name == agent.member for thread in self.threads if thread.is_alive()):
                thread = threading.Thread(
                    target=self._pull, args=(receiver, self.newest, 2.0), name=agent.member
                )
                thread.start()
                self.threads.append(thread)

    def _pull(self, receiver: ChoosingReceiver, wanted: HostVersion, within_s: float) -> None:
        try:
            found = receiver.pull(wanted.version, within_s)
        except SlackwaterError as error:
            with self.lock:
                self.outcome.errors += 1
                kind = type(error).__name__
                self.outcome.kinds[kind] = self.outcome.kinds.get(kind, 0) + 1
            return
        with self.lock:
            self.outcome.pulls += 1
            self.outcome.torn += not _same(found, wanted)

    def kill_receiver(self) -> None:
        if self.receivers:
            name = sorted(self.receivers)[int(self.rng.integers(len(self.receivers)))]
            agent, _ = self.receivers.pop(name)
            agent.close()

    def restart_relay(self) -> None:
        """The relay loses all that it had; the sender sends its newest version again."""
        self.server.close()
        self.store, self.server = self._relay()
        if self.newest is not None:
            with RelayClient(self.address, _SECRET, _WITHIN_S) as client:
                publish(client, self.newest, None, _BUCKET)

    def run(self, events: int) -> None:
        actions = [self.publish, self.join, self.pull_all, self.kill_receiver]
        actions += [self.die_publishing, self.restart_relay]
        chances = [0.25, 0.2, 0.3, 0.1, 0.08, 0.07]
        try:
            self.publish()
            self.join()
            for _ in range(events):
                actions[int(self.rng.choice(len(actions), p=chances))]()
                used = [self.store, *(agent.store for agent, _ in self.receivers.values())]
                self.outcome.above_bound += any(each.used_bytes > _MAX_BYTES for each in used)
            for thread in self.threads:
                thread.join()
            self._check_end()
        finally:
            for agent, _ in self.receivers.values():
                agent.close()
            self.server.close()

    def _check_end(self) -> None:
        assert self.newest is not None
        for _, receiver in self.receivers.values():
            before = self.outcome.pulls
            self._pull(receiver, self.newest, _WITHIN_S)
            self.outcome.behind += self.outcome.pulls == before


def _same(one: HostVersion, other: HostVersion) -> bool:
    return all(map(np.array_equal, one.arrays, other.arrays))


def run_sequence(seed: int, outcome: Outcome, events: int = 14) -> None:
    """One sequence; everything that it started has ended afterwards."""
    _Sequence(seed, outcome).run(events)
