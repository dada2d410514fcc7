"""Live actions, attempts and environments: the broker's mutable records."""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from slackwater.control.actions.limit_usage import LimitClaim
from slackwater.control.actions.tenants import TenantState
from slackwater.model.action import ActionSpec, EnvironmentSpec, Grant, OutcomeKind
from slackwater.model.ids import NodeId, ResourceName
from slackwater.policy.actions.curve import DurationCurve
from slackwater.policy.actions.fair_share import advance_charge_s


@dataclass(slots=True, eq=False)
class LiveAction:
    """An action that has not ended: it runs, or waits in a lane, for an environment or a worker."""

    spec: ActionSpec
    number: int
    rank: float
    submitted_s: float
    retries_left: int
    curve: DurationCurve
    limits: tuple[tuple[ResourceName, int], ...]
    memory_mib: int
    owner: TenantState
    environment: "LiveEnvironment | None" = None
    attempt: "Attempt | None" = None
    could_start_s: float | None = None
    arrival: tuple[float, int] = (0.0, 0)
    cost_s: float = 0.0  # the advance charge of its start, over its tenant's weight

    def __post_init__(self) -> None:
        self.arrival = (self.submitted_s, self.number)
        charge_s = advance_charge_s(self.curve.least, self.curve.least_s)
        self.cost_s = charge_s / self.owner.limits.weight

    @property
    def queue_position(self) -> tuple[float, int]:
        return self.rank, self.number

    @property
    def claim(self) -> LimitClaim:
        """Its claim on the limits that it waits for."""
        return LimitClaim(self.queue_position, self.spec.tenant, self.arrival)


@dataclass(slots=True, eq=False)
class Attempt:
    """One start of an action; it holds its grant until its worker reports its end.

    `ends_s` is the expected end, `stopping` the outcome of a stopped attempt, which may be reported
    to the owner (`outcome_reported`) before the worker reports; a `short` one could not use more
    units.
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
    outcome_reported: bool = False
    short: bool = False
    charged_s: float = 0.0  # unit-seconds, charged to its tenant


class EnvironmentState(StrEnum):
    """`AWAY`: restored from the durable log, while its worker has not reconnected yet."""

    WAITING = "waiting"
    OPENING = "opening"
    OPEN = "open"
    AWAY = "away"


@dataclass(slots=True, eq=False)
class LiveEnvironment:
    """An environment that has not ended. The actions in `queue` run one at a time, in order.

    `busy` is the attempt that runs in it, perhaps a stopped one that has not reported its end.
    """

    spec: EnvironmentSpec
    number: int
    rank: float
    state: EnvironmentState
    owner: TenantState
    node: NodeId | None = None
    queue: deque[LiveAction] = field(default_factory=deque)
    busy: Attempt | None = None

    @property
    def ready(self) -> bool:
        return self.state is EnvironmentState.OPEN


@dataclass(slots=True)
class BrokerCounters:
    """Totals since the broker started."""

    submitted: int = 0
    started: int = 0
    restored: int = 0
    ended: dict[OutcomeKind, int] = field(default_factory=lambda: dict.fromkeys(OutcomeKind, 0))
