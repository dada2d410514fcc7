"""Live actions, attempts and environments, and what each tenant has of them: the broker's mutable
records.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from slackwater.control.actions.limit_usage import LimitClaim
from slackwater.model.action import ActionSpec, EnvironmentSpec, Grant, OutcomeKind
from slackwater.model.errors import UnavailableError
from slackwater.model.ids import NodeId, ResourceName, TenantId
from slackwater.model.tenant_limits import TenantLimits, check_environment
from slackwater.policy.actions.curve import DurationCurve
from slackwater.policy.actions.fair_share import advance_charge_s

_SHORT_QUEUE, _LONG_QUEUE = 8, 32  # actions or environments of one tenant
_PAUSE_S = 1.0  # mean pause of a tenant with a long queue
_SPREAD = 0.618034  # the golden ratio: its multiples modulo 1 are spread evenly


@dataclass(slots=True, eq=False)
class TenantState:
    """A tenant's waiting actions, environments and memory, and the limits on them. `held_mib` is
    the memory of its environments, and of running actions without one.
    """

    tenant: TenantId
    limits: TenantLimits
    waiting: int = 0
    environments: int = 0
    waiting_environments: int = 0
    held_mib: int = 0
    _pauses: int = 0

    @property
    def held_by_weight(self) -> float:
        return self.held_mib / self.limits.weight

    def pause_s(self) -> float:
        """How long to delay the tenant's next submission, so that its flood costs others little.
        Actions that already wait are not delayed.

        The pause grows with the queue, so that requests come about as fast as they are served.
        """
        queue = max(self.waiting, self.waiting_environments) - _SHORT_QUEUE
        part = min(max(queue, 0) / (_LONG_QUEUE - _SHORT_QUEUE), 1.0)
        return part * self.long_pause_s()

    def long_pause_s(self) -> float:
        """The pause with a full queue; it varies, so that many connections do not retry at once."""
        self._pauses += 1
        return _PAUSE_S * (0.5 + self._pauses * _SPREAD % 1.0)

    def full_queue_reason(self) -> str | None:
        """Why no more of its actions may wait, or None."""
        most = self.limits.waiting_actions
        if most is None or self.waiting < most:
            return None
        has = f"tenant {self.tenant or '-'} has {self.waiting} actions waiting"
        return f"{has}, as many as it may; try again later"

    def check_environment(self, spec: EnvironmentSpec) -> None:
        """Raise if the limits exclude one more environment, whatever is free."""
        check_environment(spec, self.limits)
        if self.environments >= self.limits.environments:
            has = f"tenant {self.tenant or '-'} has {self.environments} environments"
            raise UnavailableError(
                f"{has}, as many as the operator lets it ([limits] environments); close some"
            )


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
    ended: dict[OutcomeKind, int] = field(default_factory=lambda: dict.fromkeys(OutcomeKind, 0))
