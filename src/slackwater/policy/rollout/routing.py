"""Where a turn goes (ROSE 4.3; RLBoost Algorithm 2, SELECTINSTANCE), and baselines. Pure; ties are
broken by id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slackwater.model.ids import InstanceId, TrajectoryId, TurnId
from slackwater.policy.rollout.instance_load import InstanceLoad
from slackwater.policy.rollout.working_set import ContextGrowth, Tokens, empty_working_set


@dataclass(slots=True)
class TurnNeed:
    """One turn to place. `affine` served the trajectory's last turn; `resident`: the trajectory is
    in its working set; `growth` is the job's law of context growth; `sequence` counts submissions.
    """

    turn: TurnId
    trajectory: TrajectoryId
    context_tokens: int
    affine: InstanceId | None = None
    resident: bool = False
    growth: ContextGrowth | None = None
    sequence: int = 0
    _expected: Tokens | None = field(default=None, init=False, compare=False)

    @property
    def expected_tokens(self) -> Tokens:
        """What the trajectory is expected to hold as contexts grow; few decisions ask."""
        if self._expected is None:
            growth = self.growth
            self._expected = (
                empty_working_set()
                if growth is None
                else growth.forecast_tokens(self.context_tokens)
            )
        return self._expected


@dataclass(frozen=True, slots=True)
class Destination:
    """Go to `instance` now; or wait: for `bound_to` if nothing else will do, else for anyone."""

    instance: InstanceId | None = None
    bound_to: InstanceId | None = None


WAIT = Destination()


class RoutingPolicy(Protocol):
    """Chooses among instances that hold the turn's weights and may serve its job, own ones first.
    `started_first`: waiting turns of started trajectories go before those of new ones.
    """

    @property
    def started_first(self) -> bool: ...

    def place(self, need: TurnNeed, eligible: Sequence[InstanceLoad]) -> Destination: ...

    def can_take(self, need: TurnNeed, load: InstanceLoad) -> bool:
        """Whether this one instance may take the turn now (asked when it has room again)."""


def find_affine(need: TurnNeed, eligible: Sequence[InstanceLoad]) -> InstanceLoad | None:
    if need.affine is None:
        return None
    return next((load for load in eligible if load.instance == need.affine), None)


@dataclass(frozen=True, slots=True)
class RoundRobinRouting:
    """Baseline: the next instance in order, whatever its load."""

    started_first: bool = False

    def place(self, need: TurnNeed, eligible: Sequence[InstanceLoad]) -> Destination:
        accepting = [load for load in eligible if load.accepting]
        if not accepting:
            return WAIT
        return Destination(accepting[need.sequence % len(accepting)].instance)

    def can_take(self, need: TurnNeed, load: InstanceLoad) -> bool:
        return load.accepting


@dataclass(frozen=True, slots=True)
class ShortestQueue:
    """RLBoost: the fewest pending, at most `pending_limit` (Theta) anywhere; else wait."""

    pending_limit: int = 8
    started_first: bool = False

    def place(self, need: TurnNeed, eligible: Sequence[InstanceLoad]) -> Destination:
        best = min(
            (load for load in eligible if self.can_take(need, load)),
            key=lambda load: (load.pending, load.in_flight, load.instance),
            default=None,
        )
        return WAIT if best is None else Destination(best.instance)

    def can_take(self, need: TurnNeed, load: InstanceLoad) -> bool:
        return load.runs_now(need.context_tokens) or load.may_queue(self.pending_limit)


@dataclass(frozen=True, slots=True)
class PinnedTrajectory:
    """Baseline of ROSE 6.4: a trajectory stays where its first turn went until that instance is
    gone; first turns are dealt out in turn.
    """

    started_first: bool = False

    def place(self, need: TurnNeed, eligible: Sequence[InstanceLoad]) -> Destination:
        home = find_affine(need, eligible)
        accepting = [load for load in eligible if load.accepting]
        if home is None and not accepting:
            return WAIT
        if home is None:
            home = accepting[need.sequence % len(accepting)]
        if self.can_take(need, home):
            return Destination(home.instance)
        return Destination(bound_to=home.instance)

    def can_take(self, need: TurnNeed, load: InstanceLoad) -> bool:
        return load.runs_now(need.context_tokens)


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """Turn-wise: the least loaded own instance with room, else the least loaded other one."""

    started_first: bool = False

    def place(self, need: TurnNeed, eligible: Sequence[InstanceLoad]) -> Destination:
        best = min(
            (load for load in eligible if load.runs_now(need.context_tokens)),
            key=lambda load: (not load.owned, load.in_flight, load.instance),
            default=None,
        )
        return WAIT if best is None else Destination(best.instance)

    def can_take(self, need: TurnNeed, load: InstanceLoad) -> bool:
        return load.runs_now(need.context_tokens)


@dataclass(frozen=True, slots=True)
class CacheAffine:
    """ROSE: the instance that served the last turn if it has room, else the least loaded."""

    otherwise: LeastLoaded = LeastLoaded()
    started_first: bool = False

    def place(self, need: TurnNeed, eligible: Sequence[InstanceLoad]) -> Destination:
        home = find_affine(need, eligible)
        if home is not None and self.can_take(need, home):
            return Destination(home.instance)
        return self.otherwise.place(need, eligible)

    def can_take(self, need: TurnNeed, load: InstanceLoad) -> bool:
        return load.runs_now(need.context_tokens)
