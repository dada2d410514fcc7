"""Events of the broker: of actions, environments, workers, limits and services."""

from typing import TypeAlias, get_args

from slackwater.control.message import TimedMessage
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


class ActionSubmitted(TimedMessage, frozen=True):
    """A job submitted an action; it is in the durable log, if the runtime has one."""

    spec: ActionSpec


class ActionAdopted(TimedMessage, frozen=True):
    """An action from the durable log after a restart. A started one is retried or lost."""

    spec: ActionSpec
    submitted_s: float
    started: bool


class ActionFinished(TimedMessage, frozen=True):
    """All processes of an attempt are gone and its resources free.

    `ended` is DONE, FAILED or TIMED_OUT; `ran_s` is the execution without its preparation.
    """

    action: ActionId
    attempt: int
    ended: OutcomeKind
    ran_s: float
    reason: str = ""


class ActionCancelled(TimedMessage, frozen=True):
    """Its owner no longer wants it."""

    action: ActionId
    reason: str = "cancelled by its owner"


class EnvironmentRequested(TimedMessage, frozen=True):
    """A trajectory requested an environment; actions in it may be submitted from now on."""

    spec: EnvironmentSpec


class EnvironmentAdopted(TimedMessage, frozen=True):
    """An environment from the durable log after a restart: its worker should come back with it."""

    spec: EnvironmentSpec


class EnvironmentOpened(TimedMessage, frozen=True):
    """The worker has created the environment."""

    environment: EnvironmentId


class EnvironmentLost(TimedMessage, frozen=True):
    """The environment could not be created, or died: its actions are lost."""

    environment: EnvironmentId
    reason: str


class EnvironmentClosed(TimedMessage, frozen=True):
    """Its owner no longer wants it: its actions are cancelled, and it is removed."""

    environment: EnvironmentId


class WorkerJoined(TimedMessage, frozen=True):
    """A worker brings its node's resources and the environments that it already holds."""

    node: NodeId
    capacity: WorkerCapacity
    environments: tuple[EnvironmentSpec, ...] = ()


class WorkerLost(TimedMessage, frozen=True):
    """A worker is gone with everything that it held."""

    node: NodeId
    reason: str


class LimitDeclared(TimedMessage, frozen=True):
    """A limited resource of this name exists, or its limit changed."""

    limit: Limit


class ServiceDeclared(TimedMessage, frozen=True):
    """A GPU service of this name exists; every worker with GPUs stages it in host memory."""

    service: GpuService


SandboxEvent: TypeAlias = (
    EnvironmentRequested
    | EnvironmentAdopted
    | EnvironmentOpened
    | EnvironmentLost
    | EnvironmentClosed
    | WorkerJoined
    | WorkerLost
)

ActionEvent: TypeAlias = ActionSubmitted | ActionAdopted | ActionFinished | ActionCancelled
Event: TypeAlias = ActionEvent | SandboxEvent | LimitDeclared | ServiceDeclared | TimerFired

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}
