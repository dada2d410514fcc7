"""Actions, attempts and environments as the broker has them."""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from slackwater.model.action import ActionSpec, EnvironmentSpec, Grant, OutcomeKind
from slackwater.model.ids import NodeId, ResourceName
from slackwater.policy.actions.curve import Curve

if TYPE_CHECKING:
    from slackwater.control.actions.lanes import Lane


@dataclass(slots=True, eq=False)
class LiveAction:
    """An action that has not ended. It waits (in a lane, or for its environment or a worker) or runs."""

    spec: ActionSpec
    number: int
    rank: float
    submitted_s: float
    tries_left: int
    curve: Curve
    limits: tuple[tuple[ResourceName, int], ...]
    memory_mib: int
    environment: "LiveEnvironment | None" = None
    attempt: "Attempt | None" = None
    lane: "Lane | None" = None
    could_start_s: float | None = None

    @property
    def place_in_line(self) -> tuple[float, int]:
        return self.rank, self.number


@dataclass(slots=True, eq=False)
class Attempt:
    """One start of an action. It holds its grant until its worker says that it is over, even if the action has ended.

    `ends_s` is when we expect it to end. `stopping` is the outcome that awaits a stopped one; `short` says that it
    could not use more units.
    """

    number: int
    action: LiveAction
    grant: Grant
    units: int
    started_s: float
    ends_s: float
    lane: str
    stopping: OutcomeKind | None = None
    stop_reason: str = ""
    told: bool = False
    short: bool = False


class EnvironmentState(StrEnum):
    """`away`: known from the durable log, its worker is not back yet."""

    WAITING = "waiting"
    OPENING = "opening"
    OPEN = "open"
    AWAY = "away"


@dataclass(slots=True, eq=False)
class LiveEnvironment:
    """An environment that has not ended. Its actions run one at a time, in order; the first of `line` is in a lane or runs.

    `busy` is the attempt that runs in it, perhaps one that was stopped and has not reported its end yet.
    """

    spec: EnvironmentSpec
    number: int
    rank: float
    state: EnvironmentState
    node: NodeId | None = None
    line: deque[LiveAction] = field(default_factory=deque)
    busy: Attempt | None = None

    @property
    def ready(self) -> bool:
        return self.state is EnvironmentState.OPEN


@dataclass(slots=True)
class Counters:
    """Since the broker started."""

    submitted: int = 0
    started: int = 0
    restored: int = 0
    ended: dict[OutcomeKind, int] = field(default_factory=lambda: dict.fromkeys(OutcomeKind, 0))
