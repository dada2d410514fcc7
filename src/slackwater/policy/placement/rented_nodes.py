"""The rented nodes and parts of nodes: names, limits and cost."""

import heapq
from collections.abc import Collection, Iterable
from functools import cache

from slackwater.model.ids import NodeId
from slackwater.model.node import Pool, Role
from slackwater.model.placement import node_of, place_devices, place_on
from slackwater.policy.placement.fleet import FleetView


@cache
def _free_starts(free: int, whole: int, part: int) -> tuple[int, ...]:
    """The first devices of all parts of size `part` that fit into the free devices of a node."""
    wanted = (1 << part) - 1
    return tuple(first for first in range(0, whole, part) if free >> first & wanted == wanted)


class NodeStock:
    """The nodes of one pool: which are free, and for nodes divided into parts, which devices are
    free.

    `take` picks the whole node with the lowest number, so that equal decisions give equal names. It
    picks a part of the divided node with the fewest free devices.
    """

    def __init__(self, pool: Pool) -> None:
        self._role = pool.role
        self._whole = pool.node_type.devices
        self._nodes = pool.max_nodes
        self._returned: list[int] = []
        self._highest = 0
        self._free_nodes = pool.max_nodes
        self._divided: dict[int, int] = {}  # by number of a divided node: bits of its free devices
        self._parts: dict[int, int] = {}  # by part size: how many are free in divided nodes
        self.used = 0  # devices
        self.released: set[NodeId] = set()  # both since the last `take_changes_of`
        self.acquired: set[NodeId] = set()

    @property
    def used_share(self) -> float:
        return self.used / (self._nodes * self._whole)

    def free(self, part: int) -> int:
        """How many parts of a size (or whole nodes) can be taken."""
        if part == self._whole:
            return self._free_nodes
        if part not in self._parts:
            found = (self._find_free_starts(free, part) for free in self._divided.values())
            self._parts[part] = sum(map(len, found))
        return self._parts[part] + self._free_nodes * (self._whole // part)

    def take(self, part: int) -> NodeId:
        """Rent a part or a whole node. The caller must check `free` first."""
        place = self._take(part)
        (self.released.remove if place in self.released else self.acquired.add)(place)
        return place

    def _take(self, part: int) -> NodeId:
        self.used += part
        if part == self._whole:
            return self._name_node(self._take_node())
        fitting = [
            (free.bit_count(), number)
            for number, free in self._divided.items()
            if self._find_free_starts(free, part)
        ]
        number = min(fitting)[1] if fitting else self._take_node()
        free = self._divided.get(number, (1 << self._whole) - 1)
        first = self._find_free_starts(free, part)[0]
        self._set_free_devices(number, free & ~(((1 << part) - 1) << first))
        return place_on(self._name_node(number), first, part)

    def give_back(self, place: NodeId) -> None:
        (self.acquired.remove if place in self.acquired else self.released.add)(place)
        number = int(node_of(place).rsplit("-", 1)[1])
        devices = place_devices(place)
        self.used -= self._whole if devices is None else len(devices)
        if devices is not None:
            free = self._divided[number] | sum(1 << device for device in devices)
            self._set_free_devices(number, free)
            if free != (1 << self._whole) - 1:
                return
        self._free_nodes += 1
        heapq.heappush(self._returned, number)

    def _take_node(self) -> int:
        assert self._free_nodes > 0, f"no {self._role} node is free"
        self._free_nodes -= 1
        if self._returned:
            return heapq.heappop(self._returned)
        self._highest += 1
        return self._highest - 1

    def _set_free_devices(self, number: int, free: int) -> None:
        """Set the free devices of a divided node. A node with all devices free is whole again."""
        before, whole = self._divided.pop(number, 0), (1 << self._whole) - 1
        now = 0 if free == whole else free
        if free != whole:
            self._divided[number] = free
        for part in self._parts:
            self._parts[part] += len(self._find_free_starts(now, part)) - len(
                self._find_free_starts(before, part)
            )

    def _find_free_starts(self, free: int, part: int) -> tuple[int, ...]:
        return _free_starts(free, self._whole, part)

    def _name_node(self, number: int) -> NodeId:
        return NodeId(f"{self._role}-{number}")


class RentedNodes:
    """What one policy rents: nodes, or parts of the size that `fleet` has. Several policies may
    rent from the same `stocks`.
    """

    def __init__(self, fleet: FleetView, stocks: dict[Role, NodeStock] | None = None) -> None:
        self._fleet = fleet
        self._pools = {Role.ROLLOUT: fleet.rollout, Role.TRAIN: fleet.train}
        self._stocks = stocks or {role: NodeStock(pool) for role, pool in self._pools.items()}
        self._rented: dict[NodeId, Role] = {}
        self._count = {Role.ROLLOUT: 0, Role.TRAIN: 0}

    def free(self, role: Role) -> int:
        """How many nodes of a role can still be rented."""
        return self._stocks[role].free(self._pools[role].node_type.devices)

    def has_free(self, rollout_nodes: int, train_nodes: int) -> bool:
        """Whether so many nodes can still be rented."""
        return self.free(Role.ROLLOUT) >= rollout_nodes and self.free(Role.TRAIN) >= train_nodes

    def count(self, role: Role) -> int:
        """How many nodes of a role are rented."""
        return self._count[role]

    def rent(self, role: Role, nodes: int) -> list[NodeId]:
        """Rent nodes. The caller must check `free` first."""
        assert nodes <= self.free(role), (
            f"{nodes} {role} nodes asked for, {self.free(role)} are free"
        )
        names = [self._stocks[role].take(self._pools[role].node_type.devices) for _ in range(nodes)]
        self._rented |= dict.fromkeys(names, role)
        self._count[role] += nodes
        return names

    def give_back(self, node: NodeId) -> None:
        role = self._rented.pop(node)
        self._count[role] -= 1
        self._stocks[role].give_back(node)

    def list_rented(self) -> list[NodeId]:
        """The rented nodes, by role and number."""
        return sorted(self._rented, key=lambda node: (self._rented[node], *_order(node)))

    def take_changes(self) -> tuple[Collection[NodeId], Collection[NodeId]]:
        return take_changes_of(self._stocks.values())

    def worth_per_h(self, role: Role) -> float:
        """What a node is worth when policies compare places: its price. In an owned pool, the price
        times the share of devices in use.
        """
        pool = self._pools[role]
        in_use = self._stocks[role].used_share if pool.owned else 1.0
        return pool.node_type.price_per_h * in_use

    def hourly_cost(self) -> float:
        return self._fleet.price_per_h(self._count[Role.ROLLOUT], self._count[Role.TRAIN])


def take_changes_of(stocks: Iterable[NodeStock]) -> tuple[Collection[NodeId], Collection[NodeId]]:
    """The nodes of these stocks released and acquired since the last call."""
    released, acquired = set[NodeId](), set[NodeId]()
    for stock in stocks:
        released |= stock.released
        acquired |= stock.acquired
        stock.released, stock.acquired = set(), set()
    return released, acquired


@cache
def _order(node: NodeId) -> tuple[int, int]:
    devices = place_devices(node)
    return int(node_of(node).rsplit("-", 1)[1]), 0 if devices is None else devices.start
