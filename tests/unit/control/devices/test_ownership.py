"""Training operations through the fleet controller: orders wait for devices, phases see
them end.
"""

from typing import Any

from slackwater.control.coschedule.settings import CoscheduleSettings
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetEvent
from slackwater.control.jobs.events import JobSubmitted
from slackwater.control.operations import commands as do
from slackwater.control.operations import events as on
from slackwater.control.rollout.events import InstanceJoined, TurnCancelled, TurnSubmitted
from slackwater.control.steps.commands import StartEngine
from slackwater.control.steps.events import LocalEngineUp
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import (
    InstanceId,
    JobId,
    ModelId,
    RequestId,
    TenantId,
    TrajectoryId,
    TurnId,
    WorkerId,
)
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.operation import Operation, OpKind
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec

JOB, MODEL, TRAINER = JobId("run"), ModelId("m"), WorkerId("trainer")
TURN = TurnId("t")
ENGINE = InstanceSpec(InstanceId("local"), InstanceKind.LOCAL, 4, 1000, 4000, base_model="tiny")


class Stage:
    def __init__(self, **settings: Any) -> None:
        self.controller = FleetController(**settings)

    def tell(self, event: FleetEvent) -> list[Any]:
        commands = list(self.controller.handle(event))
        self.controller.check_integrity()
        for command in list(commands):
            if isinstance(command, StartEngine):
                commands += self.tell(InstanceJoined(event.now_s, command.spec))
        return [command for command in commands if not isinstance(command, SetTimer)]

    def submit(self, now_s: float, seq: int, kind: OpKind) -> list[Any]:
        operation = Operation(RequestId(f"r{seq}.{now_s}"), MODEL, seq, kind, JOB)
        return self.tell(on.OpSubmitted(now_s, operation))

    def account(self) -> tuple[float, int, float]:
        entry = self.controller.jobs.find(JOB)
        assert entry is not None
        account = entry.account
        return account.trainer_s, account.operations, account.operations_waited_s


def test_an_order_leaves_when_local_engines_have_left_the_devices_and_is_on_its_jobs_account() -> (
    None
):
    stage = Stage()
    stage.tell(JobSubmitted(0.0, JOB, TenantId("mine")))
    stage.tell(on.TrainerJoined(0.0, TRAINER))
    stage.tell(LocalEngineUp(0.0, ENGINE))
    spec = TurnSpec(TURN, TrajectoryId("x"), JOB, (1, 2), Sampling(4), "v", base_model="tiny")
    stage.tell(TurnSubmitted(1.0, spec))
    assert stage.controller.steps.is_started(ENGINE.instance), "it seeds"
    said = stage.submit(2.0, 0, OpKind.CREATE)
    assert not any(isinstance(command, do.RunOp) for command in said)
    said = stage.tell(TurnCancelled(5.0, TURN))
    (run,) = [command for command in said if isinstance(command, do.RunOp)]
    assert stage.controller.steps.holders() == {TRAINER: JOB}
    stage.tell(on.TicketDone(7.0, TRAINER, run.ticket, 2.0))
    assert stage.controller.steps.holders() == {}
    assert stage.account() == (2.0, 1, 3.0)


def test_the_next_order_of_a_trainer_follows_before_local_engines_get_its_devices() -> None:
    stage = Stage()
    stage.tell(on.TrainerJoined(0.0, TRAINER))
    stage.tell(LocalEngineUp(0.0, ENGINE))
    (create,) = stage.submit(0.0, 0, OpKind.CREATE)
    assert stage.submit(0.0, 1, OpKind.FORWARD_BACKWARD) == []
    spec = TurnSpec(TURN, TrajectoryId("x"), JOB, (1, 2), Sampling(4), "v", base_model="tiny")
    stage.tell(TurnSubmitted(1.0, spec))
    said = stage.tell(on.TicketDone(2.0, TRAINER, create.ticket, 1.0))
    assert any(isinstance(command, do.RunOp) for command in said)
    assert not stage.controller.steps.is_started(ENGINE.instance)


def test_a_trainer_that_is_lost_holds_and_wants_nothing_and_its_order_does_not_leave() -> None:
    stage = Stage()
    stage.tell(on.TrainerJoined(0.0, TRAINER))
    stage.submit(0.0, 0, OpKind.CREATE)
    stage.tell(on.TrainerLost(1.0, TRAINER, "killed"))
    assert stage.controller.devices.holders() == stage.controller.steps.holders() == {}
    (again,) = stage.tell(on.TrainerJoined(2.0, WorkerId("other")))
    assert isinstance(again, do.RunOp) and again.worker == "other"


def test_an_operation_whose_number_was_used_up_does_not_keep_its_phase_open() -> None:
    """Phases hear of an operation before they hear that it has failed."""
    coscheduler = CoscheduleSettings(placement="group").new_coscheduler(1, 1)
    stage = Stage(coscheduler=coscheduler)
    profile = JobProfile(10.0, 10.0, rollout_state_gb=0.0, train_state_gb=0.0, model_billions=0.001)
    stage.tell(JobSubmitted(0.0, JOB, TenantId("mine"), profile, JobTerms(100, 3.0)))
    stage.submit(1.0, 0, OpKind.CREATE)
    stage.submit(2.0, 1, OpKind.FORWARD_BACKWARD)
    said = stage.submit(3.0, 1, OpKind.FORWARD_BACKWARD)
    assert any(isinstance(command, do.FailOp) for command in said)
    assert stage.controller.phases is not None
    one = stage.controller.phases.find(JOB)
    assert one is not None and one.ops == {RequestId("r1.2.0")}


def test_a_gap_that_is_given_up_comes_back_to_operations_by_its_timer() -> None:
    stage = Stage()
    commands = stage.controller.handle(
        on.OpSubmitted(0.0, Operation(RequestId("r"), MODEL, 2, OpKind.FORWARD_BACKWARD, JOB))
    )
    (timer,) = [command for command in commands if isinstance(command, SetTimer)]
    stage.tell(on.TrainerJoined(1.0, TRAINER))
    said = stage.tell(TimerFired(timer.at_s, timer.name))
    assert any(isinstance(command, do.RunOp) for command in said)
