"""A fleet controller with a co-scheduler, told one thing after the other, its invariants checked
after each.
"""

from typing import TypeVar

from slackwater.control.coschedule.commands import PermitGiven
from slackwater.control.coschedule.phase_watch import PhaseLimits
from slackwater.control.coschedule.settings import CoscheduleSettings
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.control.jobs.events import JobSubmitted
from slackwater.control.operations.events import OpSubmitted
from slackwater.control.operations.facts import OpEnded
from slackwater.control.rollout import commands as do
from slackwater.control.rollout import events as of_rollout
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.control.weights.events import InstanceReady, WeightsPublished
from slackwater.model.ids import (
    InstanceId,
    JobId,
    ModelId,
    NodeId,
    RequestId,
    TenantId,
    TrajectoryId,
    TurnId,
)
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.job_life import JobStage
from slackwater.model.operation import Operation, OpKind
from slackwater.model.sampling import Sampling
from slackwater.model.turn import FinishReason, TurnSpec

TENANT, VERSION = TenantId("mine"), "base"
PROFILE = JobProfile(10.0, 10.0, rollout_state_gb=0.0, train_state_gb=0.0, model_billions=0.001)
TERMS = JobTerms(100, 3.0)

C = TypeVar("C", bound=FleetCommand)


class PhaseStage:
    def __init__(
        self,
        placement: str = "group",
        engines: int = 1,
        limits: PhaseLimits | None = None,
        train_nodes: int = 1,
    ) -> None:
        scheduler = CoscheduleSettings(placement=placement).new_coscheduler(1, train_nodes)
        self.controller = FleetController(coscheduler=scheduler, limits=limits)
        assert self.controller.phases is not None
        self.keeper = self.controller.phases
        self.now_s = 0.0
        self.said: list[FleetCommand] = []
        self._turns = self._ops = 0
        self.running: dict[TurnId, do.DispatchTurn] = {}
        self.tell(WeightsPublished(0.0, None, VERSION, "m"))
        for number in range(engines):
            name = InstanceId(f"e{number}")
            spec = InstanceSpec(
                *(name, InstanceKind.DEDICATED, 8, 4096, 1 << 16),
                base_model="m",
                place=NodeId("rollout-0"),
            )
            self.tell(of_rollout.InstanceJoined(0.0, spec))
            self.tell(InstanceReady(0.0, name, VERSION))

    def tell(self, event: FleetEvent) -> list[FleetCommand]:
        self.now_s = max(self.now_s, event.now_s)
        commands = list(self.controller.handle(event))
        self.said += commands
        for command in tuple(commands):
            match command:
                case do.DispatchTurn():
                    self.running[command.turn] = command
                case do.AbortTurn(_, attempt):
                    gone = [t for t, d in self.running.items() if d.attempt == attempt]
                    for turn in gone:
                        del self.running[turn]
                case SetTimer(token, at_s) if at_s <= self.now_s:  # as every runtime does
                    commands += self.tell(TimerFired(self.now_s, token))
                case _:
                    pass
        self.controller.check_integrity()
        return commands

    @property
    def gates(self) -> dict[JobId, tuple[NodeId, ...]]:
        """Where jobs that share nodes may train now."""
        return self.controller.operations.gates()

    def of(self, kind: type[C]) -> list[C]:
        """What was said of a kind, since the last time."""
        found: list[C] = [command for command in self.said if isinstance(command, kind)]
        self.said = [command for command in self.said if not isinstance(command, kind)]
        return found

    def permits(self) -> list[tuple[str, str]]:
        """Who was given a permit for what, since the last time."""
        return [(permit.job, permit.phase.value) for permit in self.of(PermitGiven)]

    def submit(
        self, name: str, profile: JobProfile | None = PROFILE, terms: JobTerms = TERMS
    ) -> JobId:
        job = JobId(name)
        self.tell(JobSubmitted(self.now_s, job, TENANT, profile, terms))
        return job

    def stage_of(self, job: JobId) -> JobStage:
        entry = self.controller.jobs.find(job)
        assert entry is not None
        return entry.stage

    def turn(self, job: JobId) -> TurnId:
        """One more turn of the job is asked for."""
        self._turns += 1
        turn = TurnId(f"{job}.{self._turns}")
        spec = TurnSpec(
            *(turn, TrajectoryId(turn), job, (1, 2), Sampling(4), VERSION), base_model="m"
        )
        self.tell(of_rollout.TurnSubmitted(self.now_s, spec))
        return turn

    def end_turn(self, turn: TurnId, after_s: float = 0.0) -> None:
        """Its engine ends it."""
        self.now_s += after_s
        sent = self.running.pop(turn)
        tokens = [7] * (4 - len(sent.generated))
        for token in tokens:
            self.tell(
                of_rollout.TokensArrived(self.now_s, sent.instance, [sent.attempt], [token], [-1.0])
            )
        self.tell(
            of_rollout.TurnEnded(
                *(self.now_s, sent.instance, sent.attempt, FinishReason.LENGTH, 4, VERSION)
            )
        )

    def op(self, job: JobId, kind: OpKind) -> RequestId:
        """One more operation of the job waits."""
        self._ops += 1
        request = RequestId(f"{job}.op{self._ops}")
        operation = Operation(request, ModelId(f"{job}.model"), self._ops, kind, job)
        self.tell(OpSubmitted(self.now_s, operation))
        return request

    def end_op(self, job: JobId, request: RequestId, kind: OpKind, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.tell(OpEnded(self.now_s, job, request, kind, True))

    def train(self, job: JobId, took_s: float = 10.0) -> None:
        """The operations of one step, and its publishing."""
        kinds = (OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP, OpKind.PUBLISH)
        requests = [(self.op(job, kind), kind) for kind in kinds]
        for request, kind in requests:
            self.end_op(job, request, kind, took_s / len(kinds))

    def fire(self, token: str, after_s: float) -> None:
        self.now_s += after_s
        self.tell(TimerFired(self.now_s, token))
