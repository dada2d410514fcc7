"""The broker's commands. The runtime executes commands to one node in their order."""

from typing import TypeAlias

from slackwater.control.message import Message
from slackwater.control.timer import SetTimer
from slackwater.model.action import ActionSpec, EnvironmentSpec, Grant, Outcome
from slackwater.model.ids import ActionId, EnvironmentId, NodeId, ServiceName


class StartAction(Message, frozen=True):
    """Run the action on exactly this grant; answered by `ActionFinished` when all its processes are
    gone. Without `grant.node` (an API call) it needs no worker.
    """

    spec: ActionSpec
    attempt: int
    grant: Grant


class StopAction(Message, frozen=True):
    """Kill a running action with all its children, then answer with `ActionFinished` as usual."""

    node: NodeId | None
    action: ActionId
    attempt: int
    reason: str


class EndAction(Message, frozen=True):
    """The action's one outcome: log it durably, then notify its owner."""

    action: ActionId
    outcome: Outcome


class OpenEnvironment(Message, frozen=True):
    """Create the environment on this node; answer with `EnvironmentOpened` or `EnvironmentLost`."""

    node: NodeId
    spec: EnvironmentSpec


class CloseEnvironment(Message, frozen=True):
    """Remove the environment from the node with all its contents; there is no answer."""

    node: NodeId
    environment: EnvironmentId


class EndEnvironment(Message, frozen=True):
    """Notify the owner that the environment is gone, and why."""

    environment: EnvironmentId
    reason: str


class EvictService(Message, frozen=True):
    """Free a service's memory on these GPUs. Its copy in host memory stays."""

    node: NodeId
    gpus: tuple[int, ...]
    service: ServiceName


class RestoreService(Message, frozen=True):
    """Copy a service from host memory onto these GPUs; the next action there waits for it."""

    node: NodeId
    gpus: tuple[int, ...]
    service: ServiceName


EnvironmentCommand: TypeAlias = OpenEnvironment | CloseEnvironment | EndEnvironment
ServiceCommand: TypeAlias = EvictService | RestoreService
Command: TypeAlias = (
    StartAction | StopAction | EndAction | EnvironmentCommand | ServiceCommand | SetTimer
)
