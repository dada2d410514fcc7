"""What the body must do about actions. Commands to one node are carried out in their order."""

from dataclasses import dataclass
from typing import TypeAlias

from slackwater.control.timer import SetTimer
from slackwater.model.action import ActionSpec, EnvironmentSpec, Grant, Outcome
from slackwater.model.ids import ActionId, EnvironmentId, NodeId, ServiceName


@dataclass(frozen=True, slots=True)
class StartAction:
    """Run it on exactly this; answer with `ActionFinished` of this attempt when all its processes
    are gone.

    `grant.node` is None for an action that needs no worker (an API call): the body runs it where it
    likes.
    """

    spec: ActionSpec
    attempt: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class StopAction:
    """Kill a running action with all its children, then answer with `ActionFinished` as usual."""

    node: NodeId | None
    action: ActionId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndAction:
    """The action's one outcome: make it durable, then tell its owner."""

    action: ActionId
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class OpenEnvironment:
    """Make it on this node; answer with `EnvironmentOpened` or `EnvironmentLost`."""

    node: NodeId
    spec: EnvironmentSpec


@dataclass(frozen=True, slots=True)
class CloseEnvironment:
    """Remove it from the node with everything in it; nothing is reported back."""

    node: NodeId
    environment: EnvironmentId


@dataclass(frozen=True, slots=True)
class EndEnvironment:
    """Tell its owner that it is gone, and why."""

    environment: EnvironmentId
    reason: str


@dataclass(frozen=True, slots=True)
class EvictService:
    """Free the memory that a service has on these GPUs; its copy in host memory stays, so nothing
    is written back.
    """

    node: NodeId
    gpus: tuple[int, ...]
    service: ServiceName


@dataclass(frozen=True, slots=True)
class RestoreService:
    """Bring a service from host memory onto these GPUs; the action that follows on them waits for
    it.
    """

    node: NodeId
    gpus: tuple[int, ...]
    service: ServiceName


Command: TypeAlias = (
    StartAction
    | StopAction
    | EndAction
    | OpenEnvironment
    | CloseEnvironment
    | EndEnvironment
    | EvictService
    | RestoreService
    | SetTimer
)
