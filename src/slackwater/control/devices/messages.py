"""What device ownership consumes and emits."""

from dataclasses import dataclass
from typing import TypeAlias

from slackwater.control.jobs.events import JobTrained
from slackwater.control.operations import events as of_operation
from slackwater.control.operations.commands import StartWork, TrainerOrder
from slackwater.control.operations.facts import OpOver
from slackwater.control.steps.events import DevicesAsked, DevicesGranted, DevicesReturned
from slackwater.model.ids import WorkerId


@dataclass(frozen=True, slots=True)
class GrantDevices:
    """A trainer that asked by itself, without an order, has the devices until it returns them."""

    trainer: WorkerId


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
