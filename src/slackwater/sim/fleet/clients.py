"""Clients of a simulated fleet: each runs a job like a driver, by turns and operations.

An iteration samples all responses, trains on them and publishes the weights. The controller infers
phases, as in a service. A crashed driver restarts at its last iteration.
"""

from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from slackwater.control.coschedule import commands as coschedule_commands
from slackwater.control.jobs.events import JobCrashed, JobEnded, JobSubmitted
from slackwater.control.operations import commands as operation_commands
from slackwater.control.operations.events import ModelClosed, OpSubmitted
from slackwater.control.rollout import commands as rollout_commands
from slackwater.control.rollout import events
from slackwater.control.weights.events import WeightsPublished, WeightsRetired
from slackwater.model.ids import JobId, RequestId, TenantId, TrajectoryId, TurnId
from slackwater.model.job import JobTerms
from slackwater.model.operation import Operation, OpKind
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.sim.fleet.context import FleetContext
from slackwater.sim.fleet.job import BASE_MODEL, SimulatedJob
from slackwater.sim.fleet.trainers import SimulatedTrainers, extend_chain
from slackwater.sim.rollout.storm_instance import true_token

TENANT = TenantId("fleet")
PROMPT_TOKENS = 16

ClientCommand: TypeAlias = (
    rollout_commands.CompleteTurn
    | rollout_commands.FailTurn
    | operation_commands.CompleteOp
    | operation_commands.FailOp
    | coschedule_commands.StartJob
    | coschedule_commands.StopJob
    | coschedule_commands.RefuseJob
)


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """An open turn: `tokens` is its hidden length, `version` the weights that it must use."""

    job: SimulatedJob
    tokens: int
    version: str


class SimulatedClients:
    """Holds the expected results: open turns, and the state after each operation."""

    def __init__(self, fleet: FleetContext, trainers: SimulatedTrainers) -> None:
        self._fleet, self._trainers = fleet, trainers
        self.turns: dict[TurnId, AskedTurn] = {}
        self._job_of: dict[RequestId, SimulatedJob] = {}
        self._chain: dict[JobId, int] = {}
        self.completed = self.failed = self.iterations = self.crashes = 0

    def execute(self, command: ClientCommand) -> None:
        fleet = self._fleet
        match command:
            case rollout_commands.CompleteTurn():
                self._turn_completed(command)
            case rollout_commands.FailTurn(turn, error):
                self._turn_failed(turn, error)
            case operation_commands.CompleteOp(request, ticket):
                self._op_completed(request, ticket)
            case operation_commands.FailOp(request, error):
                if (job := self._job_of.get(request)) is not None:
                    self.crash(job, error)
            case coschedule_commands.StartJob(job, _, _, rollout_nodes, train_nodes):
                simulated = fleet.jobs[job]
                simulated.rollout_nodes = len(rollout_nodes)
                simulated.train_nodes = len(train_nodes)
            case coschedule_commands.StopJob(job, _, moves, reason):
                if not moves:  # like the service
                    fleet.tell(JobCrashed(fleet.now_s, job, reason))
            case coschedule_commands.RefuseJob(job):
                self._end(fleet.jobs[job])

    # ---- the lifecycle of a job ----
    def submit(self, job: SimulatedJob) -> None:
        """Submit the job and start its driver."""
        fleet, profile = self._fleet, job.spec.profile
        terms = JobTerms(
            job.spec.iterations,
            job.spec.slo,
            rollout_nodes=profile.rollout_nodes,
            train_nodes=profile.train_nodes,
            rollout_devices=profile.rollout_devices,
            train_devices=profile.train_devices,
        )
        known = profile if job.profiled else None
        fleet.tell(JobSubmitted(fleet.now_s, job.job, TENANT, known, terms))
        if not job.over:
            self._begin(job)

    def _begin(self, job: SimulatedJob) -> None:
        job.alive, job.seq = True, 0
        self._chain[job.job] = 0
        self._op(job, OpKind.CREATE)
        self._op(job, OpKind.PUBLISH)

    def crash(self, job: SimulatedJob, reason: str) -> None:
        """The driver dies with its open requests; another starts after `repair_s`."""
        fleet = self._fleet
        if not job.alive:
            return
        self.crashes += 1
        self._leave(job, reason)
        fleet.tell(JobCrashed(fleet.now_s, job.job, reason))
        fleet.after(fleet.costs.repair_s, partial(self._restart_driver, job, job.life))

    def _restart_driver(self, job: SimulatedJob, life: int) -> None:
        if job.life == life and not job.over:
            job.life += 1
            self._begin(job)

    def _leave(self, job: SimulatedJob, reason: str) -> None:
        fleet, now_s = self._fleet, self._fleet.now_s
        job.alive = False
        turns, ops = sorted(job.open_turns), list(job.open_ops)
        for turn in turns:
            self._forget_turn(job, turn)
        for request in ops:
            self._job_of.pop(request)
        job.open_ops.clear()
        fleet.tell(*(events.TurnCancelled(now_s, turn) for turn in turns))
        fleet.tell(ModelClosed(now_s, job.model, reason))

    def _finish(self, job: SimulatedJob) -> None:
        fleet, now_s = self._fleet, self._fleet.now_s
        self._leave(job, "its session ended")
        fleet.tell(JobEnded(now_s, job.job, "finished"))
        fleet.tell(WeightsRetired(now_s, job.version))
        self._end(job)

    def _end(self, job: SimulatedJob) -> None:
        if not job.over:
            job.over = True
            self._fleet.unsettled -= 1

    # ---- operations ----
    def _op(self, job: SimulatedJob, kind: OpKind) -> None:
        request = RequestId(f"{job.model}.op{job.seq}")
        operation = Operation(request, job.model, job.seq, kind, job.job)
        job.seq += 1
        job.open_ops[request], self._job_of[request] = operation, job
        self._fleet.tell(OpSubmitted(self._fleet.now_s, operation, TENANT))

    def _op_completed(self, request: RequestId, ticket: int) -> None:
        job = self._job_of.pop(request, None)
        if job is None:
            return  # its driver is gone
        operation = job.open_ops.pop(request)
        if operation.kind.changes_state:
            self._chain[job.job] = extend_chain(self._chain[job.job], operation.seq)
        got, wanted = self._trainers.results[ticket], self._chain[job.job]
        assert got == wanted, f"{request}: an operation was lost, doubled or out of order"
        if operation.kind is OpKind.PUBLISH:
            self._finish_publish(job)

    def _finish_publish(self, job: SimulatedJob) -> None:
        fleet, now_s = self._fleet, self._fleet.now_s
        before = job.version
        if job.seq > 2:  # after training; a driver first publishes its initial weights
            job.iteration += 1
            self.iterations += 1
            fleet.tell(WeightsRetired(now_s, before))
        fleet.deleted_versions.discard(job.version)  # a restarted driver publishes it again
        fleet.tell(WeightsPublished(now_s, job.job, job.version, BASE_MODEL, job.job))
        if job.iteration == job.spec.iterations:
            self._finish(job)
        elif job.supervised:
            self._train(job, job.life)
        else:
            self._roll_out(job)

    def _train(self, job: SimulatedJob, life: int) -> None:
        if job.alive and job.life == life:
            for _ in range(max(job.supervised, 1)):
                self._op(job, OpKind.FORWARD_BACKWARD)
                self._op(job, OpKind.OPTIM_STEP)
            self._op(job, OpKind.PUBLISH)

    # ---- turns ----
    def _roll_out(self, job: SimulatedJob) -> None:
        fleet = self._fleet
        lengths = fleet.plan.lengths(fleet.seed * 1000 + job.number, job.iteration)
        for number, tokens in enumerate(lengths):
            self.ask(job, f"{job.job}.{job.iteration}.{number}", tokens)

    def ask(self, job: SimulatedJob, trajectory: str, tokens: int) -> None:
        fleet = self._fleet
        job.asked_turns += 1
        turn = TurnId(f"{trajectory}.{job.asked_turns}")
        self.turns[turn] = AskedTurn(job, tokens, job.version)
        job.open_turns.add(turn)
        spec = TurnSpec(
            turn,
            TrajectoryId(turn),
            job.job,
            (1,) * PROMPT_TOKENS,
            Sampling(fleet.plan.max_tokens),
            job.version,
            base_model=BASE_MODEL,
        )
        fleet.tell(events.TurnSubmitted(fleet.now_s, spec))

    def _forget_turn(self, job: SimulatedJob, turn: TurnId) -> None:
        job.open_turns.discard(turn)
        self.turns.pop(turn, None)

    def _turn_completed(self, command: rollout_commands.CompleteTurn) -> None:
        turn = command.turn
        asked = self.turns.get(turn)
        if asked is None:
            return  # its driver is gone
        job, version = asked.job, asked.version
        assert command.version == version, f"{turn} generated with {command.version}, not {version}"
        truth = [true_token(turn, version, position) for position in range(asked.tokens)]
        assert list(command.tokens) == truth, f"{turn}: tokens were lost, doubled or changed"
        self.completed += 1
        self._forget_turn(job, turn)
        if not job.open_turns and not job.samples_only:
            fleet = self._fleet
            fleet.after(fleet.costs.handover_s, partial(self._train, job, job.life))

    def _turn_failed(self, turn: TurnId, error: str) -> None:
        """Submit the turn again: an iteration needs all its responses."""
        asked = self.turns.get(turn)
        if asked is None:
            return
        assert "deadline" not in error, f"{turn} failed: {error}"
        self.failed += 1
        self._forget_turn(asked.job, turn)
        self.ask(asked.job, turn.rsplit(".", 1)[0], asked.tokens)
