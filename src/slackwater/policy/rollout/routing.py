"""Routing of turns to instances (ROSE 4.3; RLBoost Algorithm 2, SELECTINSTANCE), and baselines.
Ties are broken by id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slackwater.model.ids import InstanceId, TrajectoryId, TurnId
from slackwater.policy.rollout.instance_load import InstanceLoad
from slackwater.policy.rollout.long_tail import TimeLeft
from slackwater.policy.rollout.working_set import ContextGrowth, Tokens, empty_working_set


@dataclass(slots=True)
class TurnNeed:
    """A turn to place. `affine` is the instance that served the trajectory's last turn; `resident`
    says whether the trajectory is in the working set there. `growth` predicts how contexts of the
    job grow. `sequence` counts submissions. `time_left` is forecast where instances are lent.
    """

    turn: TurnId
    trajectory: TrajectoryId
    context_tokens: int
    affine: InstanceId | None = None
    resident: bool = False
    growth: ContextGrowth | None = None
    sequence: int = 0
    time_left: TimeLeft | None = None
    _expected: Tokens | None = field(default=None, init=False, compare=False)

    @property
    def expected_tokens(self) -> Tokens:
        """The cache that the trajectory is expected to need as it grows. Computed on demand,
        because few decisions need it.
        """
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
    """Send the turn to `instance` now. Without one it waits: for `bound_to` only, or for any
    instance.
    """

    instance: InstanceId | None = None
    bound_to: InstanceId | None = None


WAIT = Destination()


class RoutingPolicy(Protocol):
    """Chooses among the instances that hold the turn's weights and may serve its job; owned
    instances are listed first. `started_first`: waiting turns of started trajectories precede those
    of new ones.
    """

    @property
    def started_first(self) -> bool: ...

    def place(self, need: TurnNeed, eligible: Sequence[InstanceLoad]) -> Destination: ...

    def can_take(self, need: TurnNeed, load: InstanceLoad) -> bool:
        """Whether this instance may take the turn now. Called when it has free slots again."""


def find_affine(need: TurnNeed, eligible: Sequence[InstanceLoad]) -> InstanceLoad | None:
    if need.affine is None:
        return None
    return next((load for load in eligible if load.instance == need.affine), None)


@dataclass(frozen=True, slots=True)
class RoundRobinRouting:
    """Baseline: the next instance in order, regardless of its load."""

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
    """RLBoost: the instance with the fewest pending turns. If all have `pending_limit` (Theta),
    wait.
    """

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
    """Baseline of ROSE 6.4: a trajectory stays on the instance of its first turn until that is
    lost. First turns are assigned round robin.
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
    """Each turn goes to the least loaded owned instance with free slots, else to the least loaded
    other one.
    """

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
    """ROSE: the instance that served the last turn if it can take the turn now, else the least
    loaded.
    """

    otherwise: LeastLoaded = LeastLoaded()
    started_first: bool = False

    def place(self, need: TurnNeed, eligible: Sequence[InstanceLoad]) -> Destination:
        home = find_affine(need, eligible)
        if home is not None and self.can_take(need, home):
            return Destination(home.instance)
        return self.otherwise.place(need, eligible)

    def can_take(self, need: TurnNeed, load: InstanceLoad) -> bool:
        return load.runs_now(need.context_tokens)
