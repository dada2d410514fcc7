"""Events and commands of device ownership and of the device allocator."""

from typing import TypeAlias

from slackwater.control.jobs.events import JobTrained
from slackwater.control.message import Message, TimedMessage
from slackwater.control.operations import events
from slackwater.control.operations.commands import StartWork, TrainerOrder
from slackwater.control.operations.facts import OpEnded
from slackwater.control.steps.events import DevicesAsked, DevicesGranted, DevicesReturned
from slackwater.model.device import DeploymentRequest, Device
from slackwater.model.ids import DeploymentId, DeviceId, NodeId, WorkerId


class GrantDevices(Message, frozen=True):
    """A trainer that asked for devices itself, without an order, has them until it returns them."""

    trainer: WorkerId


class DevicesReported(TimedMessage, frozen=True):
    """The agent of a node joined with all devices that the node offers."""

    node: NodeId
    devices: tuple[Device, ...]


class DevicesLost(TimedMessage, frozen=True):
    """The node is gone, with the deployments on it."""

    node: NodeId


class DeploymentsRequested(TimedMessage, frozen=True):
    """Deployments request devices; each gets all of them or none."""

    requests: tuple[DeploymentRequest, ...]


class DeploymentReleased(TimedMessage, frozen=True):
    """The deployment ended for good."""

    deployment: DeploymentId


class AssignmentsRestored(TimedMessage, frozen=True):
    """Devices by deployment before the control plane was restarted."""

    assignments: dict[DeploymentId, tuple[DeviceId, ...]]


class StartDeployment(Message, frozen=True):
    """Start a rank on each of the devices, in this order."""

    deployment: DeploymentId
    devices: tuple[Device, ...]


class RefuseDeployment(Message, frozen=True):
    """There are no devices for the deployment; the reason is for the operator."""

    deployment: DeploymentId
    reason: str


AllocationEvent: TypeAlias = (
    DevicesReported | DevicesLost | DeploymentsRequested | DeploymentReleased | AssignmentsRestored
)
AllocationCommand: TypeAlias = StartDeployment | RefuseDeployment

DeviceEvent: TypeAlias = (
    events.OpSubmitted
    | OpEnded
    | StartWork
    | DevicesGranted
    | events.TicketDetached
    | events.TicketDone
    | events.TicketFailed
    | events.TrainerLost
)
DeviceCommand: TypeAlias = TrainerOrder | GrantDevices | DevicesAsked | DevicesReturned | JobTrained
