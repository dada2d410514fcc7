"""Nodes and pools: devices, host memory, links and a price."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from slackwater.model.errors import check_above_zero


class Role(StrEnum):
    """What the nodes of a pool are used for."""

    TRAIN = "train"
    ROLLOUT = "rollout"
    SERVING = "serving"
    SPOT = "spot"
    EXTERNAL = "external"


@dataclass(frozen=True, slots=True)
class NodeType:
    """One kind of machine. Prices are per device and hour, as in the papers' tables."""

    name: str
    devices: int
    device_price_per_h: float
    host_memory_gb: float
    tflops: float
    hbm_gb: float
    hbm_tb_per_s: float

    def __post_init__(self) -> None:
        numbers = (field for field in self.__slots__ if field != "name")
        check_above_zero(f"node type {self.name}: ", self, *numbers)

    @property
    def price_per_h(self) -> float:
        return self.devices * self.device_price_per_h


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes of one role and type; up to `max_nodes` can be rented at once.

    An `owned` pool is paid for whether its nodes are used or not: it saves time, not rent. A job
    gets `least_devices` of a node, those of one deployment, or a multiple of them.
    """

    role: Role
    node_type: NodeType
    max_nodes: int
    owned: bool = False
    least_devices: int = 1

    def __post_init__(self) -> None:
        check_above_zero(f"pool {self.role}: ", self, "max_nodes")

    def part_devices(self, devices: int) -> int:
        """How many devices of one node a job gets that needs `devices`; 0 means whole nodes.

        Parts of a node have equal sizes, so that the next job can use what one leaves.
        """
        whole = self.node_type.devices
        if not 0 < devices < whole:
            return whole
        sizes = range(max(devices, self.least_devices), whole)
        return next((n for n in sizes if not whole % n and not n % self.least_devices), whole)

    def with_parts(self, devices: int) -> "Pool":
        """The pool of all parts of so many devices."""
        share = devices / self.node_type.devices
        kind = replace(
            self.node_type, devices=devices, host_memory_gb=self.node_type.host_memory_gb * share
        )
        return replace(self, node_type=kind, max_nodes=round(self.max_nodes / share))


@dataclass(frozen=True, slots=True)
class NodeSize:
    """Devices of a node's engines, or of its trainers, in all and of each deployment."""

    devices: int = 1
    of_deployment: int = 1


ONE = NodeSize()

# WEAVE Table 1: prices and rates of the two clusters; host memory of section 3.2 (1-2 TB nodes).
H20 = NodeType("H20", 8, 1.85, 2048.0, 148.0, 96.0, 4.0)
H800 = NodeType("H800", 8, 5.28, 2048.0, 989.5, 80.0, 3.35)
# Vendors' data sheets (dense bf16); prices are within the range of on-demand offers.
H100 = NodeType("H100", 8, 3.50, 2048.0, 989.5, 80.0, 3.35)
H200 = NodeType("H200", 8, 4.50, 2048.0, 989.5, 141.0, 4.8)
B200 = NodeType("B200", 8, 6.50, 2048.0, 2250.0, 180.0, 8.0)
MI300X = NodeType("MI300X", 8, 3.00, 2048.0, 1307.4, 192.0, 5.3)
KNOWN_NODE_TYPES: Mapping[str, NodeType] = {
    kind.name: kind for kind in (H20, H800, H100, H200, B200, MI300X)
}
