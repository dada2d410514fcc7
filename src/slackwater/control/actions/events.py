"""What can happen to actions, environments, workers, limits and services."""

from dataclasses import dataclass
from typing import TypeAlias, get_args

from slackwater.control.timer import TimerFired
from slackwater.model.action import (
    ActionSpec,
    EnvironmentSpec,
    GpuService,
    Limit,
    OutcomeKind,
    WorkerCapacity,
)
from slackwater.model.ids import ActionId, EnvironmentId, NodeId


@dataclass(frozen=True, slots=True)
class ActionSubmitted:
    """A job asks for an action; it is in the durable log, if the body has one."""

    now_s: float
    spec: ActionSpec


@dataclass(frozen=True, slots=True)
class ActionAdopted:
    """An action from the durable log after a restart. One that had started is run again if it may
    be, else it is lost.
    """

    now_s: float
    spec: ActionSpec
    submitted_s: float
    started: bool


@dataclass(frozen=True, slots=True)
class ActionFinished:
    """A worker says that what an attempt started is over, with all its processes: its resources are
    free again.

    `ended` is DONE, FAILED or TIMED_OUT (the worker's own limits); of a stopped one, whatever it
    came to. `ran_s` is the execution alone, without the time to prepare it.
    """

    now_s: float
    action: ActionId
    attempt: int
    ended: OutcomeKind
    ran_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ActionCancelled:
    """Its owner no longer wants it."""

    now_s: float
    action: ActionId
    reason: str = "cancelled by its owner"


@dataclass(frozen=True, slots=True)
class EnvironmentAsked:
    """A trajectory wants an environment; actions in it may be submitted from now on."""

    now_s: float
    spec: EnvironmentSpec


@dataclass(frozen=True, slots=True)
class EnvironmentAdopted:
    """An environment from the durable log after a restart: its worker should come back with it."""

    now_s: float
    spec: EnvironmentSpec


@dataclass(frozen=True, slots=True)
class EnvironmentOpened:
    """The worker has made it."""

    now_s: float
    environment: EnvironmentId


@dataclass(frozen=True, slots=True)
class EnvironmentLost:
    """It could not be made, or it died by itself: its actions are lost."""

    now_s: float
    environment: EnvironmentId
    reason: str


@dataclass(frozen=True, slots=True)
class EnvironmentClosed:
    """Its owner no longer wants it: its actions are cancelled, and it is removed."""

    now_s: float
    environment: EnvironmentId


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker brings its node's resources, and the environments that it holds already (after a
    restart of the broker).
    """

    now_s: float
    node: NodeId
    capacity: WorkerCapacity
    environments: tuple[EnvironmentSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone with everything that it held."""

    now_s: float
    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class LimitDeclared:
    """There is a limited resource by this name, or its limit changed."""

    now_s: float
    limit: Limit


@dataclass(frozen=True, slots=True)
class ServiceDeclared:
    """There is a GPU service by this name; the body stages it in the host memory of every worker
    with GPUs.
    """

    now_s: float
    service: GpuService


PlaceEvent: TypeAlias = (
    EnvironmentAsked
    | EnvironmentAdopted
    | EnvironmentOpened
    | EnvironmentLost
    | EnvironmentClosed
    | WorkerJoined
    | WorkerLost
)

Event: TypeAlias = (
    ActionSubmitted
    | ActionAdopted
    | ActionFinished
    | ActionCancelled
    | PlaceEvent
    | LimitDeclared
    | ServiceDeclared
    | TimerFired
)

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}
