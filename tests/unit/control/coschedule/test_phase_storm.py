"""Jobs of all kinds under one co-scheduler, from a seed: clients that stop, drivers that crash,
nodes and engines that are lost, permits that are returned late or never. After every event all
invariants hold; when the jobs have ended nothing of them is left.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from phase_stage import PROFILE, TENANT, PhaseStage

from slackwater.control.coschedule.commands import StopJob
from slackwater.control.coschedule.events import NodeLost, PhaseFinished
from slackwater.control.coschedule.phase_controller import WATCH
from slackwater.control.coschedule.phase_cycle import REST
from slackwater.control.coschedule.phase_events import PermitAsked, PermitProgress, PermitReturned
from slackwater.control.coschedule.phase_watch import PhaseLimits
from slackwater.control.jobs.events import JobCrashed, JobEnded, JobHeard, JobSubmitted
from slackwater.control.rollout import events as of_rollout
from slackwater.model.ids import InstanceId, JobId, NodeId, RequestId
from slackwater.model.job import JobTerms
from slackwater.model.job_life import JobStage
from slackwater.model.operation import OpKind
from slackwater.model.placement import Phase

STEP = (OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP, OpKind.PUBLISH)


class Storm:
    def __init__(self, seed: int, yield_s: float = 10.0) -> None:
        self.rng = random.Random(seed)
        placement = ("group", "ours", "horizon")[seed % 3]
        limits = PhaseLimits(
            lease_s=60.0,
            factor=3.0,
            share_after=1.5,
            least_s=40.0,
            unknown_s=200.0,
            yield_s=yield_s,
            strikes=4,
        )
        self.stage = PhaseStage(placement, engines=1 + seed % 4, limits=limits)
        self.clients: list[JobId] = []
        self.askers: list[JobId] = []
        self.ops: dict[JobId, list[tuple[RequestId, OpKind]]] = {}
        self.killed: set[JobId] = set()
        self.idle_since_s: float | None = None  # nobody runs, and somebody who would has no place

    def programs(self) -> list[JobId]:
        """Decorated programs that still run."""
        return [job for job in self.living(self.askers) if job not in self.killed]

    def say_alive(self) -> None:
        for job in self.programs():
            self.stage.tell(JobHeard(self.stage.now_s, job))

    def check_not_idle(self) -> None:
        """An idle fleet does not keep a job from a place that asks for one, for long."""
        keeper, now_s = self.stage.keeper, self.stage.now_s
        waits = [j for j in self.programs() if self.stage.stage_of(j) is JobStage.HELD]
        willing = [
            j
            for j in waits
            if (one := keeper.find(j)) is not None and one.permit_request is not None
        ]
        busy = any(one.permit is not None for one in keeper.jobs()) or any(self.left().values())
        if busy or not willing:
            self.idle_since_s = None
            return
        self.idle_since_s = now_s if self.idle_since_s is None else self.idle_since_s
        most_s = keeper.limits.lease_s + keeper.limits.yield_s
        assert now_s - self.idle_since_s <= most_s, f"{willing} held by an idle fleet"

    def living(self, jobs: list[JobId]) -> list[JobId]:
        return [job for job in jobs if not self.stage.stage_of(job).over]

    def step(self) -> None:
        stage, rng = self.stage, self.rng
        stage.now_s += rng.expovariate(0.5)
        for stopped in stage.of(StopJob):
            if not stopped.moves:
                stage.tell(JobCrashed(stage.now_s, stopped.job, stopped.reason))
        match rng.randrange(14):
            case 0 if len(self.clients) < 4:
                self._submit(f"c{len(self.clients)}", self.clients)
            case 1 if len(self.askers) < 3:
                self._submit(f"o{len(self.askers)}", self.askers)
            case 2 | 3 | 4 if self.living(self.clients):
                job = rng.choice(self.living(self.clients))
                for _ in range(rng.randint(1, 6)):
                    stage.turn(job)
            case 5 | 6 if self.living(self.clients):
                job = rng.choice(self.living(self.clients))
                kinds = rng.choice((STEP, STEP, STEP[:2], STEP[2:]))  # some only train, or publish
                self.ops.setdefault(job, []).extend((stage.op(job, kind), kind) for kind in kinds)
            case 7 if self.programs():
                job = rng.choice(self.programs())
                phase = rng.choice((Phase.ROLLOUT, Phase.TRAIN))
                stage.tell(PermitAsked(stage.now_s, job, phase, rng.randrange(5)))
            case 8:
                self._trouble()
            case 9:
                stage.fire(WATCH, 0.0)
                for job in self.clients + self.askers:
                    stage.fire(f"{REST}{job}", 0.0)
            case _:
                self.work()

    def _submit(self, name: str, to: list[JobId]) -> None:
        profile = PROFILE if self.rng.random() < 0.6 else None
        slo = self.rng.uniform(1.5, 5.0)
        to.append(self.stage.submit(name, profile, JobTerms(10_000, slo)))

    def _trouble(self) -> None:
        stage, rng = self.stage, self.rng
        everybody = self.living(self.clients + self.askers)
        if not everybody:
            return
        job = rng.choice(everybody)
        match rng.randrange(6):
            case 5 if self.programs():
                self.killed.add(rng.choice(self.programs()))
            case 0:
                stage.tell(JobCrashed(stage.now_s, job, "its driver died"))
            case 1:
                node = NodeId(rng.choice(("rollout-0", "train-0")))
                stage.tell(NodeLost(stage.now_s, node))
            case 2:
                stage.tell(PhaseFinished(stage.now_s, job, 10**6, 1.0))
                stage.tell(PermitReturned(stage.now_s, job, 10**6, 1.0))
            case 3:
                for turn in [t for t in stage.running if t.startswith(f"{job}.")]:
                    stage.running.pop(turn, None)  # the one before may have ended the phase
                    stage.tell(of_rollout.TurnCancelled(stage.now_s, turn))
            case _ if rng.random() < 0.2:
                stage.tell(JobEnded(stage.now_s, job, "stopped", "its owner stopped it"))
            case _:
                stage.tell(PermitProgress(stage.now_s, job, 10**6, 1, 2, 3))

    def work(self) -> None:
        """Whoever has a permit gets on with it."""
        stage, rng = self.stage, self.rng
        for turn in list(stage.running):
            if turn in stage.running and rng.random() < 0.5:
                stage.end_turn(turn)
        for job, waiting in self.ops.items():
            one = stage.keeper.find(job)
            if waiting and (
                one is None
                or waiting[0][1] is OpKind.PUBLISH
                or (one.permit and one.permit.phase is Phase.TRAIN)
            ):
                request, kind = waiting.pop(0)
                stage.end_op(job, request, kind)
        self.say_alive()
        for job in self.programs():
            one = stage.keeper.find(job)
            if one is not None and one.permit is not None and rng.random() < 0.6:
                known_as = one.permit.client_number
                stage.tell(PermitProgress(stage.now_s, job, known_as, 9, 10))
                stage.tell(PermitReturned(stage.now_s, job, known_as, 1.0))

    def calm(self) -> None:
        """No more trouble and nothing new: time passes, timers fire, and whoever may work does,
        until it is done for a while.
        """
        done = 0
        for _ in range(300):
            done = 0 if any(self.left().values()) else done + 1
            if done > 20:
                return
            self.calm_step()

    def calm_step(self) -> None:
        stage = self.stage
        stage.now_s += 3.0
        self.check_not_idle()
        for stopped in stage.of(StopJob):
            if not stopped.moves:
                stage.tell(JobCrashed(stage.now_s, stopped.job, stopped.reason))
        self.work()
        stage.fire(WATCH, 0.0)
        for job in self.clients + self.askers:
            stage.fire(f"{REST}{job}", 0.0)

    def left(self) -> dict[JobId, int]:
        """What whoever has a place has still to do."""
        everybody = self.living(self.clients + self.askers)
        placed = [job for job in everybody if self.stage.stage_of(job) is not JobStage.HELD]
        return {job: self.work_left(job) for job in placed}

    def work_left(self, job: JobId) -> int:
        turns = sum(
            turn.startswith(f"{job}.") for turn in self.stage.controller.rollout.state.turns
        )
        return turns + len(self.ops.get(job, ()))


@pytest.mark.parametrize("seed", range(9))
def test_after_the_storm_whoever_has_a_place_gets_everything_done(seed: int) -> None:
    storm = Storm(seed)
    for _ in range(200):
        storm.step()
    storm.calm()
    left = storm.left()
    assert left == dict.fromkeys(left, 0)
    everybody = storm.living(storm.clients + storm.askers)
    assert left or not everybody, "all wait, and nobody has a place"


@pytest.mark.parametrize("seed", range(6))
def test_programs_that_are_killed_keep_nobody_from_an_idle_fleet(seed: int) -> None:
    """All that were there are killed in whatever they do; the next one has the fleet."""
    storm = Storm(seed, yield_s=1e6)
    stage = storm.stage
    for _ in range(120):
        storm.step()
    for client in storm.living(storm.clients):
        stage.tell(JobEnded(stage.now_s, client, "finished"))
    storm.killed.update(storm.askers)
    late = stage.submit("late", PROFILE, JobTerms(10_000, 1.01))
    storm.askers.append(late)
    one = stage.keeper.find(late)
    assert one is not None
    for _ in range(150):
        if one.iteration > 2:
            break
        if one.permit is None and one.permit_request is None:
            phase = stage.keeper.scheduler.next_phase(late) or Phase.ROLLOUT
            stage.tell(PermitAsked(stage.now_s, late, phase, one.iteration))
        storm.calm_step()
    assert one.iteration > 2


def test_a_program_that_is_killed_is_not_placed_again_until_it_asks() -> None:
    stage = PhaseStage(limits=PhaseLimits(lease_s=60.0, yield_s=1e6))
    gone = stage.submit("gone", terms=JobTerms(100, 1.0))
    stage.tell(JobHeard(stage.now_s, gone))
    stage.tell(PermitAsked(stage.now_s, gone, Phase.ROLLOUT, 0))
    assert stage.permits() == [("gone", "rollout")]
    stage.fire(WATCH, 61.0)
    assert stage.stage_of(gone) is JobStage.HELD
    comes = stage.submit("comes", replace(PROFILE, rollout_s=40.0))
    assert stage.stage_of(comes) is JobStage.PLACED
    stage.tell(JobEnded(stage.now_s, comes, "finished"))
    assert stage.permits() == []
    stage.tell(PermitAsked(stage.now_s, gone, Phase.ROLLOUT, 0))
    assert stage.permits() == [("gone", "rollout")] and stage.stage_of(gone) is JobStage.PLACED


def test_a_driver_that_dies_is_placed_again_since_it_starts_with_a_place() -> None:
    stage = PhaseStage()
    job = JobId("driven")
    stage.tell(JobSubmitted(stage.now_s, job, TENANT, PROFILE, JobTerms(100, 3.0), 0, True))
    stage.tell(PermitAsked(stage.now_s, job, Phase.ROLLOUT, 0))
    stage.tell(JobCrashed(stage.now_s, job, "its driver ended"))
    assert stage.stage_of(job) is JobStage.PLACED


def test_a_program_that_is_killed_between_its_phases_makes_room_after_its_lease() -> None:
    stage = PhaseStage(limits=PhaseLimits(lease_s=60.0, yield_s=1e6))
    gone = stage.submit("gone", terms=JobTerms(100, 1.0))
    waits = stage.submit("waits", replace(PROFILE, rollout_s=40.0))
    stage.tell(PermitAsked(stage.now_s, waits, Phase.ROLLOUT, 0))
    for _ in range(40):
        stage.now_s += 5.0
        stage.tell(JobHeard(stage.now_s, gone))
        stage.fire(f"{REST}{gone}", 0.0)
    assert stage.stage_of(waits) is JobStage.HELD, "it lives, and keeps its place"
    stage.fire(f"{REST}{gone}", 61.0)
    assert stage.permits() == [("waits", "rollout")]


def test_an_unprofiled_job_has_failed_the_third_time_like_any_other() -> None:
    stage = PhaseStage(limits=PhaseLimits(lease_s=60.0, strikes=3))
    job = stage.submit("new", profile=None)
    for strike in range(3):
        assert stage.stage_of(job) is JobStage.PROFILING, strike
        stage.tell(PermitAsked(stage.now_s, job, Phase.ROLLOUT, 0))
        assert stage.permits() == [("new", "rollout")]
        stage.fire(WATCH, 61.0)
    assert stage.stage_of(job) is JobStage.FAILED


@pytest.mark.parametrize("seed", range(6))
def test_no_invariant_breaks_and_nothing_is_left_behind(seed: int) -> None:
    storm = Storm(seed)
    stage = storm.stage
    for _ in range(200):
        storm.step()
    for job in storm.living(storm.clients + storm.askers):
        stage.tell(JobEnded(stage.now_s, job, "finished"))
    assert not list(stage.keeper.scheduler.permits.active())
    assert not stage.keeper.jobs()
    assert all(nodes is None for nodes in stage.gates.values())


def lost(now_s: float, instance: InstanceId) -> of_rollout.RolloutEvent:
    return of_rollout.InstanceLost(now_s, instance, "killed")


def drained(now_s: float, instance: InstanceId) -> of_rollout.RolloutEvent:
    return of_rollout.DrainRequested(now_s, instance, move_turns=True)


def noticed(now_s: float, instance: InstanceId) -> of_rollout.RolloutEvent:
    return of_rollout.InstanceNotice(now_s, instance, now_s + 30.0)


@pytest.mark.parametrize("end", [lost, drained, noticed])
def test_an_engine_that_goes_under_a_tail_does_not_strand_it(
    end: Callable[[float, InstanceId], of_rollout.RolloutEvent],
) -> None:
    stage = PhaseStage(engines=3)
    a, b = stage.submit("a"), stage.submit("b")
    turns = [stage.turn(a) for _ in range(10)]
    for turn in turns[:7]:
        stage.end_turn(turn)
    stage.turn(b)
    stage.end_turn(turns[7])
    (tail,) = {stage.running[turn].instance for turn in turns[8:]}
    stage.tell(end(stage.now_s, InstanceId(tail)))
    assert all(stage.running[turn].instance != tail for turn in turns[8:])
