"""Drivers of submitted jobs: one process at a time, whatever happens to it, to its job and to the
control plane.
"""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.control.jobs import commands as do
from slackwater.control.jobs import driver_events as on
from slackwater.control.jobs import events as of_job
from slackwater.control.jobs.drivers import MOST_CRASHES
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId, TenantId
from slackwater.model.job import JobTerms
from slackwater.model.job_life import JobAccount, JobStage

TENANT, TERMS = TenantId("mine"), JobTerms(iterations=9, slo=1.5)
JOB = JobId("mine/one")


@dataclass
class Kept:
    """What the store has of a job."""

    attempt: int = 0
    crashes: int = 0
    over: JobStage | None = None
    reason: str = ""


GONE = Kept(over=JobStage.STOPPED)


@dataclass
class Body:
    """Processes and a store that survive the controller; placement answers as `answer` says."""

    controller: FleetController = field(default_factory=FleetController)
    now_s: float = 0.0
    answer: str = "placed"
    running: dict[JobId, int] = field(default_factory=dict)  # attempt of the process that lives
    leaving: set[JobId] = field(default_factory=set)
    started: list[tuple[JobId, int]] = field(default_factory=list)
    timers: dict[str, float] = field(default_factory=dict)
    store: dict[JobId, Kept] = field(default_factory=dict)

    def tell(self, event: FleetEvent) -> None:
        commands = list(self.controller.handle(event))
        self.controller.check_integrity()
        for command in commands:
            self.execute(command)

    def execute(self, command: FleetCommand) -> None:
        match command:
            case do.PlaceJob(job):
                self.tell(of_job.JobAnswered(self.now_s, job, self.answer, "said so"))  # type: ignore[arg-type]  # drawn from the three
            case do.KeepDriver(job, attempt, crashes, over, reason):
                self.store[job] = Kept(attempt, crashes, over, reason)
            case do.StartDriver(job, attempt):
                assert job not in self.running, "two drivers of one job"
                assert self.store[job].attempt == attempt, "started before it was written down"
                assert (job, attempt) not in self.started
                self.running[job] = attempt
                self.started.append((job, attempt))
            case do.EndDriver(job, attempt):
                assert self.running.get(job) == attempt
                self.leaving.add(job)
            case SetTimer(name, at_s):
                self.timers[name] = at_s
            case _:
                raise AssertionError(command)

    def submit(self, job: JobId = JOB) -> None:
        self.store.setdefault(job, Kept()).over = None
        self.tell(on.DriverSubmitted(self.now_s, job, TENANT, TERMS))

    def end(self, job: JobId = JOB, status: int | None = 1, *, hopeless: bool = False) -> None:
        attempt = self.running.pop(job)
        self.leaving.discard(job)
        self.tell(on.DriverEnded(self.now_s, job, attempt, status, "oh", hopeless))

    def wait(self) -> None:
        """Until the next timer."""
        if self.timers:
            name = min(self.timers, key=lambda n: self.timers[n])
            self.now_s = max(self.now_s, self.timers.pop(name))
            self.tell(TimerFired(self.now_s, name))

    def restart_plane(self) -> None:
        """SIGKILL of the control plane: the store and the processes stay."""
        self.controller, self.timers = FleetController(), {}
        self.leaving.clear()
        for job, kept in self.store.items():
            stage = kept.over or JobStage.STOPPED
            self.tell(
                of_job.JobAdopted(
                    self.now_s, job, TENANT, JobAccount(), stage, kept.reason, terms=TERMS
                )
            )
            self.tell(
                on.DriverAdopted(
                    *(self.now_s, job, TENANT, TERMS, None, kept.attempt, kept.crashes),
                    lives=job in self.running,
                    over=kept.over,
                )
            )

    def stage(self, job: JobId = JOB) -> JobStage:
        entry = self.controller.jobs.find(job)
        assert entry is not None
        return entry.stage


def test_a_driver_runs_once_its_job_is_placed_and_its_end_is_the_jobs() -> None:
    body = Body(answer="held")
    body.submit()
    assert body.started == [] and body.stage() is JobStage.HELD
    body.tell(of_job.JobAnswered(1.0, JOB, "placed", "a job left"))
    assert body.started == [(JOB, 1)]
    body.end(status=0)
    assert body.stage() is JobStage.FINISHED


def test_a_crash_is_a_new_arrival_and_starts_again_after_a_pause() -> None:
    body = Body()
    body.submit()
    body.end(status=-9)
    entry = body.controller.jobs.find(JOB)
    assert entry is not None and entry.crashes == 1
    assert body.running == {}
    body.wait()
    assert body.running == {JOB: 2}


def test_a_job_whose_driver_keeps_crashing_has_failed_with_its_last_words() -> None:
    body = Body()
    body.submit()
    for _ in range(MOST_CRASHES):
        body.end(status=3)
        body.wait()
    entry = body.controller.jobs.find(JOB)
    assert entry is not None and entry.stage is JobStage.FAILED
    assert entry.reason == f"its driver ended {MOST_CRASHES} times in a row: status 3: oh"
    assert body.running == {}


def test_iterations_between_crashes_start_the_count_anew() -> None:
    body = Body()
    body.submit()
    for _ in range(3 * MOST_CRASHES):
        body.tell(of_job.IterationDone(body.now_s, JOB))
        body.end()
        body.wait()
    assert JOB in body.running


def test_a_driver_with_wrong_input_is_not_tried_again() -> None:
    body = Body()
    body.submit()
    body.end(status=2, hopeless=True)
    assert body.stage() is JobStage.FAILED and len(body.started) == 1


def test_stop_keeps_the_job_and_resume_is_a_new_arrival() -> None:
    body = Body()
    body.submit()
    body.tell(of_job.IterationDone(1.0, JOB))
    body.tell(on.StopAsked(2.0, JOB))
    assert body.leaving == {JOB} and body.stage() is not JobStage.STOPPED
    body.end(status=-15)
    assert body.stage() is JobStage.STOPPED
    body.tell(on.ResumeAsked(3.0, JOB))
    entry = body.controller.jobs.find(JOB)
    assert entry is not None and entry.iterations_done == 1
    assert body.running == {JOB: 2}


def test_a_refused_job_has_no_driver() -> None:
    body = Body(answer="refused")
    body.submit()
    assert body.started == [] and body.stage() is JobStage.REFUSED


def test_sessions_that_outlive_a_driver_do_not_bring_its_job_back() -> None:
    body = Body()
    body.submit()
    body.end(status=0)
    body.tell(of_job.JobSubmitted(1.0, JOB, TENANT))
    assert body.stage() is JobStage.FINISHED


def test_a_job_that_was_taken_over_before_its_driver_gets_it_then() -> None:
    body = Body()
    body.tell(of_job.JobSubmitted(0.0, JOB, TENANT, None, TERMS, 3))
    body.tell(on.DriverAdopted(0.0, JOB, TENANT, TERMS, attempt=4))
    assert body.running == {JOB: 5}
    body.end(status=0)
    assert body.stage() is JobStage.FINISHED


def test_a_crash_while_it_is_profiled_profiles_it_again() -> None:
    body = Body(controller=FleetController(profiles_jobs=True))
    commands = list(body.controller.handle(on.DriverSubmitted(0.0, JOB, TENANT, TERMS)))
    starts = [command for command in commands if isinstance(command, do.StartDriver)]
    assert starts == [do.StartDriver(JOB, 1)]
    again = list(body.controller.handle(on.DriverEnded(1.0, JOB, 1, 1)))
    assert do.ProfileJob(JOB, TERMS) in again


def test_a_plane_that_comes_back_adopts_the_driver_that_lives() -> None:
    body = Body()
    body.submit()
    body.restart_plane()
    assert body.started == [(JOB, 1)] and body.stage() is JobStage.PLACED
    body.end(status=0)
    assert body.stage() is JobStage.FINISHED


def test_a_plane_that_comes_back_starts_a_driver_that_died_meanwhile_and_blames_nobody() -> None:
    body = Body()
    body.submit()
    del body.running[JOB]
    body.restart_plane()
    assert body.started == [(JOB, 1), (JOB, 2)]
    driver = body.controller.drivers.find(JOB)
    assert driver is not None and driver.crashes == 0


class Storm:
    """Crashes, stops, resumes, refusals and planes that die, in any order; `Body` checks what it is
    told.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.body = Body()
        self.jobs = [JobId(f"mine/{n}") for n in range(3)]

    def blow(self) -> None:
        body, job = self.body, self.chance.choice(self.jobs)
        body.now_s += self.chance.random()
        body.answer = self.chance.choice(["placed", "placed", "placed", "held", "refused"])
        late = on.DriverEnded(body.now_s, job, body.running.get(job, 1) - 1, 1)
        events: list[FleetEvent] = [
            on.StopAsked(body.now_s, job),
            on.ResumeAsked(body.now_s, job),
            of_job.JobAnswered(body.now_s, job, "placed", "now"),
            of_job.JobCrashed(body.now_s, job, "its node is gone"),
            of_job.IterationDone(body.now_s, job),
            late,
        ]
        happens = self.chance.randrange(12)
        if happens < len(events):
            body.tell(events[happens])
        elif happens == 6:
            body.restart_plane()
        elif happens == 7 and body.store.get(job, GONE).over and job not in body.running:
            body.submit(job)
        elif happens <= 9 and job in body.running:
            body.end(job, self.chance.choice([0, 1, -9, None]))
        else:
            body.wait()

    def calm_down(self) -> None:
        """Every driver that runs finishes, every pause ends, every job gets its place."""
        self.body.answer = "placed"
        for _ in range(200):
            for job in list(self.body.running):
                self.body.end(job, 0)
            self.body.wait()
            for job in self.jobs:
                self.body.tell(of_job.JobAnswered(self.body.now_s, job, "placed", "now"))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_storm_never_runs_two_drivers_of_a_job_and_loses_no_job(seed: int) -> None:
    storm = Storm(seed)
    for _ in range(150):
        storm.blow()
    storm.calm_down()
    for job in storm.body.store:
        assert storm.body.stage(job).over, f"{job} is {storm.body.stage(job)} for ever"
    assert storm.body.running == {}


def test_a_keys_job_ends_when_it_has_been_idle_and_not_while_a_turn_is_open() -> None:
    body = Body()
    key = JobId("mine/-")
    body.tell(of_job.JobSubmitted(0.0, key, TENANT))
    body.tell(TurnOpened(0.0, key, "m"))
    body.tell(of_job.IdleJobsSought(10_000.0))
    assert body.stage(key) is JobStage.RUNNING
    body.tell(TurnClosed(10_000.0, key, "m"))
    body.tell(of_job.IdleJobsSought(10_100.0))
    body.tell(of_job.IdleJobsSought(20_000.0, frozenset({key})))
    assert body.stage(key) is JobStage.RUNNING
    body.tell(of_job.IdleJobsSought(20_000.0))
    assert body.stage(key) is JobStage.STOPPED
    body.tell(of_job.JobSubmitted(20_001.0, key, TENANT))
    assert body.stage(key) is JobStage.PLACED


def test_a_programs_job_ends_when_it_is_not_heard_of_and_a_drivers_with_the_driver() -> None:
    body = Body()
    program, driven = JobId("mine/program"), JobId("mine/driven")
    body.tell(of_job.JobSubmitted(0.0, program, TENANT, None, TERMS))
    body.tell(of_job.JobSubmitted(0.0, driven, TENANT, None, TERMS, driven=True))
    body.tell(of_job.JobHeard(590.0, program))
    body.tell(of_job.IdleJobsSought(1_189.0))
    assert not body.stage(program).over
    body.tell(of_job.IdleJobsSought(1_190.0))
    assert body.stage(program) is JobStage.STOPPED
    assert not body.stage(driven).over
