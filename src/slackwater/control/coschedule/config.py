"""Configuration of the co-scheduler."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from slackwater.model.errors import ConfigError
from slackwater.model.switching import SwitchCosts
from slackwater.policy.ordering.planned_order import RoundRobinOrder
from slackwater.policy.ordering.priority import FirstComeFirstServed, HighestResponseRatio, Ordering
from slackwater.policy.ordering.work_conserving import LoadedJobsSource, WorkConservingOrder

OrderingName = Literal["round_robin", "plan", "hrrs", "fcfs"]

_ORDERINGS: dict[str, Callable[[LoadedJobsSource], Ordering]] = {
    "round_robin": lambda _: RoundRobinOrder(),
    "plan": WorkConservingOrder,
    "hrrs": lambda _: HighestResponseRatio(),
    "fcfs": lambda _: FirstComeFirstServed(),
}

# Placements that are not named here use round robin.
_DEFAULT_ORDERINGS: dict[str, OrderingName] = {
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
    """The default ordering of phases for a placement policy."""
    return _DEFAULT_ORDERINGS.get(placement, "round_robin")


@dataclass(frozen=True, slots=True)
class CoScheduleConfig:
    """With `backfill` a held job may be placed before one that came earlier and fits nowhere yet.
    With `guard` a job gets nodes of its own before its SLO could break. `rebalance_every_s` adds
    periodic rebalances to those after arrivals and departures; 0 adds none.

    An SLO bounds the slowdown against declared worst-case lengths, or, with `slo_basis` "realised",
    against what the job's own phases take alone: drift makes declared lengths no bound.
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

    def new_ordering(self, loaded_jobs: LoadedJobsSource) -> Ordering:
        """The ordering of one group; `loaded_jobs` returns its members at a time."""
        return _ORDERINGS[self.ordering](loaded_jobs)
