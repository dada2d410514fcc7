"""Every command that can leave the fleet controller has an executor in a service."""

from collections.abc import Iterable

from slackwater.control.coschedule.commands import GrantPermit, ShrinkRollout
from slackwater.control.devices.messages import GrantDevices, RefuseDeployment, StartDeployment
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand
from slackwater.control.jobs.commands import ProfileJob
from slackwater.control.lending.commands import BeginStep, LendNode, ReclaimNode
from slackwater.control.rollout.commands import CompleteTurn, ReportFault
from slackwater.control.timer import SetTimer
from slackwater.control.weights.commands import DropPayload, FetchPayload
from slackwater.model.ids import InstanceId
from slackwater.runtime.executors.drivers import ProcessCommand
from slackwater.runtime.executors.engines import EngineCommand
from slackwater.runtime.executors.permits import PermitCommand
from slackwater.runtime.executors.trainers import OperationCommand
from slackwater.runtime.live_driver import live_driver

# Said by the co-scheduler to the phase keeper, to jobs where phases are kept, or to a trainer
# without an order, which only simulators have.
INSIDE = {GrantPermit, ShrinkRollout, ProfileJob, GrantDevices}


def _kinds(*unions: Iterable[type]) -> set[type]:
    return {kind for union in unions for kind in union}


def test_every_command_that_leaves_has_an_executor() -> None:
    executed = _kinds(
        EngineCommand.__args__,
        OperationCommand.__args__,
        PermitCommand.__args__,
        ProcessCommand.__args__,
        (LendNode, BeginStep, ReclaimNode, FetchPayload, DropPayload, SetTimer),
        (StartDeployment, RefuseDeployment),
    )
    leave = set(FleetCommand.__args__) - set(FleetController()._routes)
    assert leave - executed == INSIDE


def test_a_command_goes_to_the_executor_of_its_type() -> None:
    runtime = live_driver(FleetController())
    faults: list[ReportFault] = []
    runtime.register(faults.append, (ReportFault,))
    runtime.register(lambda command: faults.clear(), (CompleteTurn,))
    fault = ReportFault(InstanceId("i"), "it lies")
    runtime.execute(fault)
    assert faults == [fault]
