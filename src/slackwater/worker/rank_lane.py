"""How the ranks of an engine come to weight versions: each pulls the slices that it holds."""

from collections.abc import Sequence

from slackwater.engine.ranked_executor import RankSlices
from slackwater.model.payload import Payload
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import net_shapes
from slackwater.nets.ranks import Ranks
from slackwater.weights.plan.shard_map import ShardMap
from slackwater.weights.port import WeightStore
from slackwater.worker.published import lora_of
from slackwater.worker.weight_lane import HostVersionCopy, WeightLane


class RankLane(WeightLane):
    """One rank's pulls, from the durable store."""

    def __init__(self, durable: WeightStore, net: NetConfig, ranks: Ranks) -> None:
        super().__init__(durable)
        self._net, self._ranks = net, ranks

    def take(
        self, version: str, way: Sequence[Payload] = (), *, keep: bool = False
    ) -> HostVersionCopy:
        """This rank's slices of the version."""
        del way, keep
        return HostVersionCopy(self.fetch(version), self._durable.manifest(version).meta)

    def fetch(self, version: str) -> RankSlices:
        lora = lora_of(self._durable.manifest(version).meta)
        shapes = net_shapes(self._net) if lora is None else lora.tensor_shapes(self._net)
        shards = ShardMap(shapes, self._net.head_dim, self._ranks.layout).rank(self._ranks.rank)
        tensors, _ = self._durable.pull_slices(version, shards)
        return RankSlices(version, tensors)
