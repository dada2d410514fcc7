"""Which nodes are rented: names, limits and cost."""

import heapq

from slackwater.model.ids import NodeId
from slackwater.model.node import Role
from slackwater.policy.placement.fleet import FleetView


class RentedNodes:
    """Rents the lowest free number first, so that the same decisions give the same names."""

    def __init__(self, fleet: FleetView) -> None:
        self._fleet = fleet
        self._pools = {Role.ROLLOUT: fleet.rollout, Role.TRAIN: fleet.train}
        self._returned: dict[Role, list[int]] = {Role.ROLLOUT: [], Role.TRAIN: []}
        self._highest = {Role.ROLLOUT: 0, Role.TRAIN: 0}
        self._rented: dict[NodeId, Role] = {}
        self._count = {Role.ROLLOUT: 0, Role.TRAIN: 0}

    def free(self, role: Role) -> int:
        """Nodes of a role that could still be rented."""
        return self._pools[role].max_nodes - self._count[role]

    def count(self, role: Role) -> int:
        """Nodes of a role that are rented."""
        return self._count[role]

    def rent(self, role: Role, nodes: int) -> list[NodeId]:
        """Take so many; the caller has asked `free` first."""
        assert nodes <= self.free(role), (
            f"{nodes} {role} nodes asked for, {self.free(role)} are free"
        )
        names = []
        for _ in range(nodes):
            if self._returned[role]:
                number = heapq.heappop(self._returned[role])
            else:
                number = self._highest[role]
                self._highest[role] += 1
            name = NodeId(f"{role}-{number}")
            self._rented[name] = role
            names.append(name)
        self._count[role] += nodes
        return names

    def give_back(self, node: NodeId) -> None:
        """Stop paying for a node."""
        role = self._rented.pop(node)
        self._count[role] -= 1
        heapq.heappush(self._returned[role], int(node.rsplit("-", 1)[1]))

    def rented(self) -> list[NodeId]:
        """Sorted by role and number."""
        return sorted(
            self._rented, key=lambda node: (self._rented[node], int(node.rsplit("-", 1)[1]))
        )

    def worth_per_h(self, role: Role) -> float:
        """What a node is worth to a policy: its price; of an owned pool less, the more of its nodes
        nobody uses.
        """
        pool = self._pools[role]
        in_use = self._count[role] / pool.max_nodes if pool.owned else 1.0
        return pool.node_type.price_per_h * in_use

    def hourly_cost(self) -> float:
        """Of all rented nodes."""
        return self._fleet.price_per_h(self._count[Role.ROLLOUT], self._count[Role.TRAIN])
