"""How the co-scheduler is set up."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from slackwater.model.errors import ConfigError
from slackwater.model.switching import SwitchCosts
from slackwater.policy.ordering.planned_order import RoundRobinOrder
from slackwater.policy.ordering.priority import FirstComeFirstServed, HighestResponseRatio, Ordering
from slackwater.policy.ordering.work_conserving import Standing, WorkConservingOrder

OrderingName = Literal["round_robin", "plan", "hrrs", "fcfs"]

_ORDERINGS: dict[str, Callable[[Standing], Ordering]] = {
    "round_robin": lambda _: RoundRobinOrder(),
    "plan": WorkConservingOrder,
    "hrrs": lambda _: HighestResponseRatio(),
    "fcfs": lambda _: FirstComeFirstServed(),
}

# The order of phases that belongs to a placement; the others keep round robin.
_BELONGS: dict[str, OrderingName] = {
    "interleaving": "plan",
    "ours": "plan",
    "horizon": "hrrs",
    "pack": "hrrs",
    "spread": "hrrs",
    "spread_backfill": "hrrs",
    "gavel": "fcfs",
    "random": "fcfs",
    "most_idle": "fcfs",
}


def ordering_for(placement: str) -> OrderingName:
    """The order of phases that belongs to a placement policy."""
    return _BELONGS.get(placement, "round_robin")


@dataclass(frozen=True, slots=True)
class CoScheduleConfig:
    """`backfill` lets a waiting job be placed before one that came earlier and fits nowhere yet.
    With `guard`, a job gets nodes of its own before its SLO could break. `rebalance_every_s` 0: on
    arrivals only. `slo_basis`: the SLO bounds the time against declared worst-case lengths, or,
    where those are no bound (drift), against what the job's own phases would take alone.
    """

    ordering: OrderingName = "plan"
    backfill: bool = True
    guard: bool = True
    shrink_tails: bool = True
    drift_tolerance: float = 0.02
    drift_headroom: float = 0.08
    rebalance_every_s: float = 0.0
    slo_basis: Literal["declared", "realised"] = "declared"
    switching: SwitchCosts = field(default_factory=SwitchCosts)

    def __post_init__(self) -> None:
        if self.ordering not in _ORDERINGS:
            raise ConfigError.of(
                "ordering", self.ordering, f"is not known; write one of {', '.join(_ORDERINGS)}"
            )

    def new_ordering(self, standing: Standing) -> Ordering:
        """One per group; `standing` tells how its members stand at a moment."""
        return _ORDERINGS[self.ordering](standing)
