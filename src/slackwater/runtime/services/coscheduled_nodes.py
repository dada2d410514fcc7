"""The fleet's nodes under the co-scheduler's names (`rollout-0`, `train-0`), and parts of them."""

from collections.abc import Sequence

from slackwater.model.ids import NodeId, WorkerId
from slackwater.model.node import NodeSize
from slackwater.model.placement import place_devices, place_on


class CoscheduledNodes:
    """A fleet node has one name in each pool that it is part of."""

    def __init__(
        self, nodes: tuple[Sequence[str], Sequence[str]], sizes: tuple[NodeSize, NodeSize]
    ) -> None:
        """`nodes` and `sizes` are those of the rollout pool, then those of the train pool."""
        pools = ("rollout", "train")
        self._sizes = dict(zip(pools, sizes, strict=True))
        self._names = {
            (pool, NodeId(node)): NodeId(f"{pool}-{number}")
            for pool, names in zip(pools, nodes, strict=True)
            for number, node in enumerate(names)
        }
        self.fleet_nodes = {name: str(node) for (_, node), name in self._names.items()}

    def names_of(self, node: NodeId) -> list[NodeId]:
        """The names of a fleet node, one for each pool that it is part of."""
        return [name for (_, named), name in self._names.items() if named == node]

    def locate(self, pool: str, node: NodeId | None, worker: WorkerId) -> NodeId | None:
        """The place of a worker's deployment (`n0.engine-0-2.1`): a co-scheduled node, or the part
        of one that the deployment's number stands for.

        A deployment beyond the node's size serves only jobs that have the whole node.
        """
        name = None if node is None else self._names.get((pool, node))
        if name is None:
            return None
        size = self._sizes[pool]
        number = worker.rpartition(".")[0].rpartition("-")[2]
        first = int(number) * size.of_deployment if number.isdecimal() else size.devices
        if size.of_deployment == size.devices or first + size.of_deployment > size.devices:
            return name
        return place_on(name, first, size.of_deployment)

    def share(self, place: NodeId) -> float:
        """The part of its node that a place is, at most 1."""
        devices = place_devices(place)
        pool = place.partition("-")[0]
        return 1.0 if devices is None else len(devices) / self._sizes[pool].devices
