"""Settings of the co-scheduler of a service: which jobs share which nodes, in which order, within
which limits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slackwater.control.coschedule.config import CoScheduleConfig, OrderingName, ordering_for
from slackwater.control.coschedule.phase_watch import PhaseLimits
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.model.errors import ConfigError
from slackwater.model.node import ONE, NodeSize, NodeType, Pool, Role
from slackwater.model.switching import SwitchCosts
from slackwater.policy.placement.catalogue import POLICIES, make_policy
from slackwater.policy.placement.fleet import FleetView, MoveCost


@dataclass(frozen=True, slots=True)
class CoscheduleSettings:
    """`ordering` "auto" is the default of the placement. `host_memory_gb` bounds the states of all
    jobs on one node. `switching` and `move` are the assumed costs of changing jobs on a node and of
    moving a job.
    """

    placement: str = "interleaving"
    ordering: Literal["auto", "plan", "round_robin", "hrrs", "fcfs"] = "auto"
    backfill: bool = True
    guard: bool = True
    tails: bool = True
    host_memory_gb: float = 16.0
    options: Mapping[str, float] = field(default_factory=dict)
    limits: PhaseLimits = field(default_factory=PhaseLimits)
    switching: SwitchCosts = field(default_factory=lambda: SwitchCosts(0.0, 0.06, 5.0, 3.0))
    move: MoveCost = field(default_factory=lambda: MoveCost(5.0, 8.88))

    def __post_init__(self) -> None:
        if self.placement not in POLICIES:
            fix = f"is none of: {', '.join(POLICIES)}"
            raise ConfigError.of("coschedule: placement", self.placement, fix)
        if self.host_memory_gb <= 0:
            fix = "must be above 0"
            raise ConfigError.of("coschedule: host_memory_gb", self.host_memory_gb, fix)
        self.new_coscheduler(1, 1)  # refuses wrong options now, not at the first job

    @property
    def order(self) -> OrderingName:
        """The name of the ordering of phases."""
        return ordering_for(self.placement) if self.ordering == "auto" else self.ordering

    def new_coscheduler(
        self, rollout_nodes: int, train_nodes: int, sizes: tuple[NodeSize, NodeSize] = (ONE, ONE)
    ) -> CoScheduler:
        """A co-scheduler over nodes of one price and of these sizes. Profiles are measured, so SLOs
        are held against observed lengths.
        """

        def pool(role: Role, nodes: int, size: NodeSize) -> Pool:
            price, memory_gb = 8.0 / size.devices, self.host_memory_gb
            kind = NodeType("node", size.devices, price, memory_gb, 1.0, 1.0, 1.0)
            return Pool(role, kind, nodes, least_devices=size.of_deployment)

        fleet = FleetView(
            pool(Role.ROLLOUT, rollout_nodes, sizes[0]),
            pool(Role.TRAIN, train_nodes, sizes[1]),
            self.move,
            engines_on_train_nodes=False,
            switching=self.switching,
        )
        config = CoScheduleConfig(
            ordering=self.order,
            backfill=self.backfill,
            guard=self.guard,
            shrink_tails=self.tails,
            slo_basis="realised",
            drift_tolerance=0.25,
            drift_headroom=0.1,
            switching=self.switching,
        )
        return CoScheduler(make_policy(self.placement, fleet, self.options), fleet, config)
