"""Events and commands of the fleet controller: the messages of all its components."""

from typing import TypeAlias

from slackwater.control.coschedule import commands as coschedule_commands
from slackwater.control.coschedule import events as coschedule_events
from slackwater.control.coschedule import phase_events
from slackwater.control.coschedule.commands import PhaseCommand
from slackwater.control.devices import messages as device_messages
from slackwater.control.jobs import driver_events
from slackwater.control.jobs import events as job_events
from slackwater.control.jobs.commands import DriverCommand, JobCommand
from slackwater.control.lending import demand
from slackwater.control.lending.commands import LendingCommand
from slackwater.control.operations import commands as operation_commands
from slackwater.control.operations import events as operation_events
from slackwater.control.rollout import events as rollout_events
from slackwater.control.rollout.commands import RolloutCommand
from slackwater.control.steps import events as step_events
from slackwater.control.steps.commands import StepCommand
from slackwater.control.weights import events as weight_events
from slackwater.control.weights.commands import WeightCommand

FleetEvent: TypeAlias = (
    rollout_events.RolloutEvent
    | operation_events.Event
    | device_messages.DeviceEvent
    | device_messages.AllocationEvent
    | demand.LoanEvent
    | weight_events.WeightEvent
    | step_events.StepEvent
    | job_events.JobEvent
    | driver_events.DriverEvent
    | coschedule_events.Event
    | phase_events.PhaseEvent
)
FleetCommand: TypeAlias = (
    RolloutCommand
    | operation_commands.Command
    | device_messages.DeviceCommand
    | device_messages.AllocationCommand
    | LendingCommand
    | WeightCommand
    | StepCommand
    | JobCommand
    | DriverCommand
    | coschedule_commands.Command
    | PhaseCommand
)

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in FleetEvent.__args__}
