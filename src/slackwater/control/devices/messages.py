"""What device ownership consumes and emits."""

from typing import TypeAlias

from slackwater.control.jobs.events import JobTrained
from slackwater.control.message import Message, TimedMessage
from slackwater.control.operations import events
from slackwater.control.operations.commands import StartWork, TrainerOrder
from slackwater.control.operations.facts import OpOver
from slackwater.control.steps.events import DevicesAsked, DevicesGranted, DevicesReturned
from slackwater.model.device import DeploymentRequest, Device
from slackwater.model.ids import DeploymentId, DeviceId, NodeId, WorkerId


class GrantDevices(Message, frozen=True):
    """A trainer that asked by itself, without an order, has the devices until it returns them."""

    trainer: WorkerId


class DevicesReported(TimedMessage, frozen=True):
    """The agent of a node has joined; these are all devices that the node lends."""

    node: NodeId
    devices: tuple[Device, ...]


class DevicesLost(TimedMessage, frozen=True):
    """The node is gone, with the deployments on it."""

    node: NodeId


class DeploymentsRequested(TimedMessage, frozen=True):
    """Deployments are to run; each gets all its devices or none."""

    requests: tuple[DeploymentRequest, ...]


class DeploymentReleased(TimedMessage, frozen=True):
    """The deployment has ended for good."""

    deployment: DeploymentId


class AssignmentsRestored(TimedMessage, frozen=True):
    """Who owned which devices before the control plane was started again."""

    assignments: dict[DeploymentId, tuple[DeviceId, ...]]


class StartDeployment(Message, frozen=True):
    """Start a rank on each of the devices, in this order."""

    deployment: DeploymentId
    devices: tuple[Device, ...]


class RefuseDeployment(Message, frozen=True):
    """There are no devices for it; the reason is for the operator."""

    deployment: DeploymentId
    reason: str


AllocationEvent: TypeAlias = (
    DevicesReported | DevicesLost | DeploymentsRequested | DeploymentReleased | AssignmentsRestored
)
AllocationCommand: TypeAlias = StartDeployment | RefuseDeployment

DeviceEvent: TypeAlias = (
    events.OpSubmitted
    | OpOver
    | StartWork
    | DevicesGranted
    | events.TicketDetached
    | events.TicketDone
    | events.TicketFailed
    | events.TrainerLost
)
DeviceCommand: TypeAlias = TrainerOrder | GrantDevices | DevicesAsked | DevicesReturned | JobTrained

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in DeviceEvent.__args__}
ALLOCATION_TYPES: dict[str, type] = {kind.__name__: kind for kind in AllocationEvent.__args__}
