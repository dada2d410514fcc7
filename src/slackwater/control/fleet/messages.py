"""What can happen to a fleet, and what its controller asks for: the messages of all components."""

from typing import TypeAlias

from slackwater.control.coschedule import commands as schedule_do
from slackwater.control.coschedule import events as of_schedule
from slackwater.control.coschedule import phase_events as of_phase
from slackwater.control.coschedule.phase_commands import PhaseCommand
from slackwater.control.devices import messages as of_device
from slackwater.control.jobs import driver_events as of_driver
from slackwater.control.jobs import events as of_job
from slackwater.control.jobs.commands import JobCommand
from slackwater.control.jobs.driver_commands import DriverCommand
from slackwater.control.lending import demand as of_lending
from slackwater.control.lending.commands import LendingCommand
from slackwater.control.operations import commands as operations_do
from slackwater.control.operations import events as of_operation
from slackwater.control.rollout import events as of_rollout
from slackwater.control.rollout.commands import RolloutCommand
from slackwater.control.steps import events as of_step
from slackwater.control.steps.commands import StepCommand
from slackwater.control.weights import events as of_weight
from slackwater.control.weights.commands import WeightCommand

FleetEvent: TypeAlias = (
    of_rollout.RolloutEvent
    | of_operation.Event
    | of_device.DeviceEvent
    | of_device.AllocationEvent
    | of_lending.LoanEvent
    | of_weight.WeightEvent
    | of_step.StepEvent
    | of_job.JobEvent
    | of_driver.DriverEvent
    | of_schedule.Event
    | of_phase.PhaseEvent
)
FleetCommand: TypeAlias = (
    RolloutCommand
    | operations_do.Command
    | of_device.DeviceCommand
    | of_device.AllocationCommand
    | LendingCommand
    | WeightCommand
    | StepCommand
    | JobCommand
    | DriverCommand
    | schedule_do.Command
    | PhaseCommand
)

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in FleetEvent.__args__}
