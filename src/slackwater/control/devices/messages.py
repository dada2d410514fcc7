"""What device ownership consumes and emits."""

from dataclasses import dataclass
from typing import TypeAlias

from slackwater.control.jobs.events import JobTrained
from slackwater.control.operations import events as of_operation
from slackwater.control.operations.commands import StartWork, TrainerOrder
from slackwater.control.operations.facts import OpOver
from slackwater.control.steps.events import DevicesAsked, DevicesGranted, DevicesReturned
from slackwater.model.device import DeploymentRequest, Device
from slackwater.model.ids import DeploymentId, DeviceId, NodeId, WorkerId


@dataclass(frozen=True, slots=True)
class GrantDevices:
    """A trainer that asked by itself, without an order, has the devices until it returns them."""

    trainer: WorkerId


@dataclass(frozen=True, slots=True)
class DevicesReported:
    """The agent of a node has joined; these are all devices that the node lends."""

    now_s: float
    node: NodeId
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class DevicesLost:
    """The node is gone, with the deployments on it."""

    now_s: float
    node: NodeId


@dataclass(frozen=True, slots=True)
class DeploymentsRequested:
    """Deployments are to run; each gets all its devices or none."""

    now_s: float
    requests: tuple[DeploymentRequest, ...]


@dataclass(frozen=True, slots=True)
class DeploymentReleased:
    """The deployment has ended for good."""

    now_s: float
    deployment: DeploymentId


@dataclass(frozen=True, slots=True)
class AssignmentsRestored:
    """Who owned which devices before the control plane was started again."""

    now_s: float
    assignments: dict[DeploymentId, tuple[DeviceId, ...]]


@dataclass(frozen=True, slots=True)
class StartDeployment:
    """Start a rank on each of the devices, in this order."""

    deployment: DeploymentId
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class RefuseDeployment:
    """There are no devices for it; the reason is for the operator."""

    deployment: DeploymentId
    reason: str


AllocationEvent: TypeAlias = (
    DevicesReported | DevicesLost | DeploymentsRequested | DeploymentReleased | AssignmentsRestored
)
AllocationCommand: TypeAlias = StartDeployment | RefuseDeployment

DeviceEvent: TypeAlias = (
    of_operation.OpSubmitted
    | OpOver
    | StartWork
    | DevicesGranted
    | of_operation.TicketDetached
    | of_operation.TicketDone
    | of_operation.TicketFailed
    | of_operation.TrainerLost
)
DeviceCommand: TypeAlias = TrainerOrder | GrantDevices | DevicesAsked | DevicesReturned | JobTrained

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in DeviceEvent.__args__}
ALLOCATION_TYPES: dict[str, type] = {kind.__name__: kind for kind in AllocationEvent.__args__}
