"""Pulls weight versions over the node's relay as routed, or from the durable store.

The durable store is authoritative: whatever the relay cannot deliver comes from there.
"""

import argparse
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from slackwater.engine.ranked_executor import RankSlices
from slackwater.model.errors import SlackwaterError
from slackwater.model.payload import Payload
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import net_shapes
from slackwater.nets.lora import LoraSpec
from slackwater.nets.ranks import Ranks
from slackwater.weights.plan.shard_map import ShardMap
from slackwater.weights.relay.client import Address
from slackwater.weights.relay.host_copy import torch_tensors
from slackwater.weights.relay.pull_process import PullProcess
from slackwater.weights.relay.reader import RelayReader
from slackwater.weights.relay.receiver import Receiver
from slackwater.worker.files import WeightStore
from slackwater.worker.process import address_of, node_secret

logger = logging.getLogger(__name__)

_KEPT_COPIES = 2  # must match control/weights/holder_versions.py
_WITHIN_S = 120.0
_MEMORY_BYTES = 1 << 40  # no limit: it receives into the version's own memory


def lora_meta(lora: LoraSpec | None) -> dict[str, Any]:
    """The `meta` of a version: whether its tensors are an adapter, and of which shape."""
    return {"lora": None if lora is None else asdict(lora)}


def lora_of(meta: Mapping[str, Any]) -> LoraSpec | None:
    """The adapter's shape that `lora_meta` wrote, or None for whole weights."""
    lora = meta.get("lora")
    return None if lora is None else LoraSpec(**lora)


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
            self._reader = RelayReader(relay, secret, node=node, max_bytes=_MEMORY_BYTES)
            self._receiver = Receiver(self._reader, keep=_KEPT_COPIES)
        self.pulled_over_relay = self.pulled_from_store = 0

    def take(
        self, version: str, route: Sequence[Payload] = (), *, keep: bool = False
    ) -> HostVersionCopy:
        """The version, exactly as published."""
        with self._lock:
            if route and self._receiver is not None:
                try:
                    pulled, kept = self._receiver.take(
                        version, route, keep=keep, within_s=self._within_s
                    )
                    self.pulled_over_relay += 1
                    return HostVersionCopy(torch_tensors(pulled), pulled.meta, kept)
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
