"""Pulls weight versions beside the decode loop; they become visible between two steps.

They come over the node's relay as routed, or from the durable store. That one is authoritative:
whatever the relay cannot deliver comes from there.
"""

import argparse
import logging
import os
import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from slackwater.engine.ranked_executor import RankSlices
from slackwater.model.errors import SlackwaterError
from slackwater.model.payload import Payload
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import net_shapes
from slackwater.nets.lora import lora_of
from slackwater.nets.ranks import Ranks
from slackwater.weights.plan.shard_map import ShardMap
from slackwater.weights.relay.client import Address
from slackwater.weights.relay.host_copy import torch_tensors
from slackwater.weights.relay.pull_process import PullProcess
from slackwater.weights.relay.reader import RelayReader
from slackwater.weights.relay.receiver import Receiver
from slackwater.wire import messages
from slackwater.worker.files import WeightStore
from slackwater.worker.process import address_of, node_secret

if TYPE_CHECKING:
    from slackwater.engine.engine import Engine

logger = logging.getLogger(__name__)

_KEPT_COPIES = 2  # must match control/weights/director_state.py
_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class HostVersionCopy:
    """A read-only version on the host (an adapter: on the device); `kept` for later deltas."""

    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]
    kept: bool = False


class WeightLane:
    """One worker's pulls, one at a time; without a `relay` all come from the durable store.

    With `own_process`, relay pulls run in a separate process, so that steps never wait for them.
    """

    def __init__(
        self,
        durable: WeightStore,
        relay: Address | None = None,
        *,
        secret: bytes = b"",
        node: str = "",
        device: str = "cpu",
        within_s: float = _WITHIN_S,
        own_process: bool = False,
    ) -> None:
        self._durable, self._device = durable, device
        self._within_s = within_s
        self._lock = threading.Lock()
        self._reader: RelayReader | None = None
        self._receiver: Receiver | PullProcess | None = None
        if relay is not None and own_process:
            self._receiver = PullProcess(relay, secret, node=node, keep=_KEPT_COPIES)
        elif relay is not None:
            self._reader = RelayReader(relay, secret, node=node)
            self._receiver = Receiver(self._reader, keep=_KEPT_COPIES)
        self.pulled_over_relay = self.pulled_from_store = 0

    def take(
        self, version: str, route: Sequence[Payload] = (), *, keep: bool = False
    ) -> HostVersionCopy:
        """The version, exactly as published."""
        with self._lock:
            if route and self._receiver is not None:
                try:
                    pulled = self._receiver.take(version, route, keep=keep, within_s=self._within_s)
                    self.pulled_over_relay += 1
                    return HostVersionCopy(torch_tensors(pulled), pulled.meta, keep)
                except SlackwaterError as error:
                    logger.warning(
                        "version not pulled over the relay version=%s: %s", version, error
                    )
            meta = self._durable.manifest(version).meta
            device = "cpu" if lora_of(meta) is None else self._device
            tensors = self._durable.pull(version, device)
            self.pulled_from_store += 1
            return HostVersionCopy(tensors, meta)

    def close(self) -> None:
        """End the connections to the relay."""
        if self._reader is not None:
            self._reader.close()
        if isinstance(self._receiver, PullProcess):
            self._receiver.close()


def weight_lane(
    durable: WeightStore,
    options: argparse.Namespace,
    device: str = "cpu",
    *,
    own_process: bool = False,
) -> WeightLane:
    """The lane for a worker's options: over its node's relay, if there is one."""
    relay = address_of(options.relay) if options.relay else None
    secret = b"" if relay is None else node_secret().encode()
    return WeightLane(
        durable,
        relay,
        secret=secret,
        node=options.node,
        device=device,
        own_process=own_process,
    )


class RankLane(WeightLane):
    """One rank's pulls, from the durable store."""

    def __init__(self, durable: WeightStore, net: NetConfig, ranks: Ranks) -> None:
        super().__init__(durable)
        self._net, self._ranks = net, ranks

    def take(
        self, version: str, route: Sequence[Payload] = (), *, keep: bool = False
    ) -> HostVersionCopy:
        """This rank's slices of the version."""
        del route, keep
        return HostVersionCopy(self.fetch(version), self._durable.manifest(version).meta)

    def fetch(self, version: str) -> RankSlices:
        lora = lora_of(self._durable.manifest(version).meta)
        shapes = net_shapes(self._net) if lora is None else lora.tensor_shapes(self._net)
        shards = ShardMap(shapes, self._net.head_dim, self._ranks.layout).rank(self._ranks.rank)
        tensors, _ = self._durable.pull_slices(version, shards)
        return RankSlices(version, tensors)


_NICENESS = 19  # little of a core that a step needs, all of an idle one


@dataclass(slots=True)
class _Pull:
    """A version being pulled. `host_copy` is set once it is in host memory. Whole weights then get
    a reserved `net` in the engine, which no request sees yet.
    """

    version: str
    route: tuple[Payload, ...]
    keep: bool
    host_copy: HostVersionCopy | None = None
    net: CausalLM | None = None
    error: Exception | None = None


class VersionPuller:
    """Pulls versions into an engine; call every method from the thread that steps it.

    `fileno()` becomes readable when `advance()` has work, so a loop may wait on it.
    """

    def __init__(self, engine: "Engine", lane: WeightLane) -> None:
        self._engine = engine
        self._lane = lane
        self._work_queue: queue.SimpleQueue[_Pull | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Pull] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._pulling: dict[str, bool] = {}  # whether to drop the version on arrival
        self._thread = threading.Thread(target=self._work, name="weight puller", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._wake_read.fileno()

    def request(
        self, version: str, route: Sequence[Payload] = (), *, keep: bool = False
    ) -> messages.VersionReady | None:
        """Start to pull a version over a relay route; answers at once if the engine has it."""
        if version in self._pulling:
            self._pulling[version] = False
            return None
        if version in self._engine.versions.names():
            return messages.VersionReady(version)
        self._pulling[version] = False
        self._work_queue.put(_Pull(version, tuple(route), keep))
        return None

    def pulling(self) -> tuple[str, ...]:
        return tuple(self._pulling)

    def drop_later(self, version: str) -> bool:
        """Whether the version is being pulled; if so, drop it on arrival."""
        if version not in self._pulling:
            return False
        self._pulling[version] = True
        return True

    def advance(self) -> list[messages.VersionReady | messages.VersionFailed]:
        """Between two steps: place arrived versions, activate complete ones, report outcomes."""
        outcomes: list[messages.VersionReady | messages.VersionFailed] = []
        while not self._done.empty():
            self._wake_read.recv(1)
            pull = self._done.get()
            try:
                ready = self._advance_pull(pull)
            except (SlackwaterError, OSError) as error:
                del self._pulling[pull.version]
                outcomes.append(messages.VersionFailed(pull.version, str(error)))
            else:
                outcomes += [] if ready is None else [ready]
        return outcomes

    def _advance_pull(self, pull: _Pull) -> messages.VersionReady | None:
        """Give a version in host memory a slot, or activate it; raises the thread's error."""
        versions = self._engine.versions
        if pull.error is not None:
            if pull.net is not None:
                versions.abandon(pull.net)
            raise pull.error
        host_copy = pull.host_copy
        assert host_copy is not None
        if pull.net is not None:
            versions.finish(pull.version, pull.net)
        elif (lora := lora_of(host_copy.meta)) is not None:
            versions.put(pull.version, host_copy.tensors, lora=lora)
        else:
            pull.net = versions.begin()
            self._work_queue.put(pull)
            return None
        pull.host_copy = None  # free it: the thread refers to the pull until its next one
        if self._pulling.pop(pull.version):
            versions.drop(pull.version)
        return messages.VersionReady(pull.version, host_copy.kept)

    def close(self) -> None:
        """End the thread after its current pull."""
        self._work_queue.put(None)
        self._thread.join()
        self._wake_read.close()
        self._wake_write.close()

    def _work(self) -> None:
        # Threads have their own priority: steps come first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (pull := self._work_queue.get()) is not None:
            try:
                if pull.host_copy is None:
                    pull.host_copy = self._lane.take(pull.version, pull.route, keep=pull.keep)
                else:
                    assert pull.net is not None
                    self._engine.versions.fill(pull.net, pull.host_copy.tensors)
            except Exception as error:  # noqa: BLE001  (the thread's edge: the loop decides what it means)
                pull.error = error
            self._done.put(pull)
            self._wake_write.send(b"!")
