"""The step tracker: which trainers have the shared devices, and when a job's step begins and ends
(RLBoost 4.2).

Local engines and trainers share one set of devices, so only one kind works at a time. A job's step
begins with its first turn while no trainer works, and ends with its optim_step; the step of a job
that never trains ends with its turns. How long local engines roll out is the rollout manager's
decision (`SeedingChanged`): an engine works as long as one of its jobs seeds. Without local engines
every request for devices is granted at once.

An engine that sleeps keeps the devices until it reports `EngineRested`. If it does not within
`REST_S` it is ended, and its loss frees them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from slackwater.control.jobs.events import JobEnded
from slackwater.control.operations.commands import StartWork
from slackwater.control.operations.events import TrainerLost
from slackwater.control.rollout.commands import ReleaseInstance
from slackwater.control.rollout.events import (
    InstanceLost,
    StepBegan,
    StepDropped,
    StepEnded,
    TrainerWaits,
    TrainerWanted,
)
from slackwater.control.rollout.facts import InstanceReleased, TurnClosed, TurnOpened
from slackwater.control.steps import events
from slackwater.control.steps.commands import RestEngine, StartEngine, StepCommand
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import InstanceId, JobId, WorkerId
from slackwater.model.instance import InstanceSpec

WAIT_REPORT_S = 5.0  # between two `TrainerWaits`
RESTART_S = 1.0
REST_S = 60.0  # meanwhile a server copies its weights to the host
STEP = "step:"  # of the names of its timers; a job follows
REST = "rest:"  # an instance follows


@dataclass(slots=True)
class RolloutStep:
    """A job's current or last step: its turns, its training, and how long the trainer waited for
    it. `base_models` are those of all its turns.
    """

    job: JobId
    number: int = 0
    running: bool = False
    seeding: bool = False  # local engines may run its turns
    live_turns: int = 0
    turns: int = 0
    expected_turns: int = 1
    announced: bool = False  # the driver set `expected_turns`; else it is guessed
    tokens: int = 0
    trained_tokens: int = 0
    train_s: float = 0.0
    waited_s: float = 0.0
    waits_since_s: float | None = None
    last_response_s: float = 0.0
    trains: bool = False  # a trainer has worked for it: an optim_step will end the step
    job_ended: bool = False
    base_models: set[str] = field(default_factory=set)

    def can_use(self, spec: InstanceSpec) -> bool:
        """Whether the engine can run its turns."""
        return spec.serves_any(self.job, self.base_models)

    def begin(self) -> None:
        """Begin the next step with the turns that are live."""
        self.number += 1
        self.running = True
        self.turns, self.tokens, self.trained_tokens = self.live_turns, 0, 0
        self.train_s = self.waited_s = 0.0

    def is_idle(self) -> bool:
        """Whether neither turns nor training are left to end it: the next turn begins another."""
        return self.running and not (self.live_turns or self.seeding or self.trains)

    def can_forget(self) -> bool:
        """Whether no state would be lost with it."""
        if self.live_turns or self.seeding:
            return False
        return self.job_ended or not (self.number or self.announced or self.trains)

    def training_tokens(self) -> int:
        """Tokens trained on as reported, else those that arrived before training began."""
        if self.trained_tokens:
            return self.trained_tokens
        return self.tokens if self.train_s else 0

    def end_wait(self, now_s: float) -> None:
        """The trainer no longer waits."""
        if self.waits_since_s is not None:
            self.waited_s += now_s - self.waits_since_s
            self.waits_since_s = None


class StepTracker:
    """See the module. `check_integrity()` holds after every event."""

    def __init__(self) -> None:
        self._engines: dict[InstanceId, InstanceSpec] = {}
        self._started: set[InstanceId] = set()  # engines that were started and not stopped since
        self._rest_number = 0  # of the last order to rest
        self._leaving: dict[InstanceId, int] = {}  # engines that still hold devices, and the order
        self._steps: dict[JobId, RolloutStep] = {}
        self._holders: dict[WorkerId, JobId | None] = {}
        self._wanting: dict[WorkerId, JobId | None] = {}  # trainers with work: no engine starts
        self._asking: dict[WorkerId, JobId | None] = {}  # those of them that could begin at once
        self._now_s = 0.0
        self._commands: list[StepCommand] = []

    def handle(self, event: events.StepEvent) -> Sequence[StepCommand]:
        self._now_s, self._commands = event.now_s, []
        match event:
            case TurnOpened():  # turns are the most frequent
                self._open_turn(event)
            case TurnClosed():
                self._close_turn(event)
            case (
                events.LocalEngineUp() | events.EngineRested() | InstanceReleased() | InstanceLost()
            ):
                self._take_engine_event(event)
            case events.StepExpected(_, job, turns):
                step = self._step(job)
                step.expected_turns, step.announced = max(turns, 1), True
            case events.SeedingChanged(_, job, seeds):
                self._change_seeding(self._step(job), seeds)
            case JobEnded(_, job):
                self._end_job(job)
            case TimerFired(_, name) if name.startswith(REST):
                self._end_restless(InstanceId(name.removeprefix(REST)))
            case TimerFired(_, name):
                self._check_step(JobId(name.removeprefix(STEP)))
            case _:
                self._take_trainer_event(event)
        return self._commands

    def _take_engine_event(self, event: events.EngineEvent) -> None:
        match event:
            case events.LocalEngineUp(_, spec):
                self._add_engine(spec)
            case events.EngineRested(_, instance, number):
                if self._leaving.get(instance) == number:
                    self._free_devices(instance)
            case InstanceReleased(_, instance, _, reason):
                if instance in self._engines:
                    self._stop(instance)
                    self._rest(instance, reason)
            case InstanceLost(_, instance):
                if self._engines.pop(instance, None) is not None:
                    self._stop(instance)
                self._free_devices(instance)

    def _take_trainer_event(self, event: events.TrainerEvent) -> None:
        match event:
            case events.DevicesWanted(_, trainer, job) | StartWork(_, trainer, job):
                self._wanting[trainer] = job
                self._end_waits()
            case events.DevicesUnwanted(_, trainer):
                self._withdraw(trainer)
            case TrainerLost(_, trainer):
                self._holders.pop(trainer, None)
                self._withdraw(trainer)
            case events.DevicesAsked(_, trainer, job):
                self._request_devices(trainer, job)
            case events.DevicesReturned():
                self._return_devices(event)
            case _:
                assert_never(event)

    # ---- queries ----
    def is_local(self, instance: InstanceId) -> bool:
        """Whether it is an engine on the trainers' devices."""
        return instance in self._engines

    def is_started(self, instance: InstanceId) -> bool:
        """Whether it was started, and not stopped since."""
        return instance in self._started

    def resting(self) -> list[InstanceSpec]:
        """Local engines that do not work now."""
        return [spec for name, spec in self._engines.items() if name not in self._started]

    def holders(self) -> dict[WorkerId, JobId | None]:
        """Trainers that have the devices, and for which job."""
        return dict(self._holders)

    def jobs(self) -> list[JobId]:
        """Jobs with a step that is not forgotten."""
        return list(self._steps)

    def _seeding_jobs(self) -> list[JobId]:
        return [step.job for step in self._steps.values() if step.seeding]

    def _jobs_seeding_on(self, spec: InstanceSpec) -> list[JobId]:
        steps = self._steps.values()
        return [step.job for step in steps if step.seeding and step.can_use(spec)]

    # ---- local engines ----
    def _add_engine(self, spec: InstanceSpec) -> None:
        self._engines[spec.instance] = spec
        self._started.discard(spec.instance)
        if self._jobs_seeding_on(spec):
            self._start(spec, again=True)
        elif spec.sleeps:
            self._rest(spec.instance, "it has just come up")
        for step in list(self._steps.values()):
            if step.can_use(spec):
                self._advance(step)

    def _stop(self, instance: InstanceId) -> None:
        """The engine is lost or released. If one of its jobs seeds on, it is started again soon."""
        self._started.discard(instance)
        spec = self._engines.get(instance)
        if spec is not None and (seeding := self._jobs_seeding_on(spec)):
            self._set_timer(STEP + seeding[0], RESTART_S)

    def _rest(self, instance: InstanceId, reason: str) -> None:
        number = None
        if self._engines[instance].sleeps:
            self._rest_number += 1
            number = self._leaving[instance] = self._rest_number
            self._set_timer(REST + instance, REST_S)
        self._commands.append(RestEngine(instance, reason, number))

    def _free_devices(self, instance: InstanceId) -> None:
        """The engine has left the devices, if it was told to."""
        if self._leaving.pop(instance, None) is not None:
            self._grant_all()

    def _end_restless(self, instance: InstanceId) -> None:
        """End an engine that should have rested by now. Repeat that until it is lost."""
        if instance in self._leaving:
            self._engines.pop(instance, None)
            reason = f"it did not rest in {REST_S:g} s"
            self._commands.append(ReleaseInstance(instance, reason))
            self._set_timer(REST + instance, REST_S)

    def _start_all(self, step: RolloutStep, *, again: bool) -> None:
        for name, spec in self._engines.items():
            if name not in self._started and step.can_use(spec):
                self._start(spec, again=again)

    def _start(self, spec: InstanceSpec, *, again: bool) -> None:
        self._started.add(spec.instance)
        self._leaving.pop(spec.instance, None)
        self._commands.append(StartEngine(spec, again))

    def _seed(self, step: RolloutStep, *, again: bool) -> None:
        assert not self._holders, f"{self._holders} hold the devices of the local engines"
        step.seeding = True
        step.end_wait(self._now_s)
        self._start_all(step, again=again)

    def _change_seeding(self, step: RolloutStep, seeds: bool) -> None:
        if seeds:
            self._seed(step, again=True)
            return
        step.seeding = False
        # The rollout manager cannot release engines that are still starting: it does not know them.
        for name in sorted(self._started):
            if self._jobs_seeding_on(self._engines[name]):
                continue
            self._started.remove(name)
            if self._engines[name].sleeps:
                self._rest(name, "its seeding has ended")
        self._grant_all()
        # Turns of other jobs may have lost their engine. Their steps are checked by a timer that is
        # due at once, not here: trainers that have work learn first that the devices are free.
        for other in self._steps.values():
            if other.live_turns and not other.seeding:
                self._set_timer(STEP + other.job, 0.0)
        if step.can_forget():
            del self._steps[step.job]

    # ---- turns ----
    def _open_turn(self, event: TurnOpened) -> None:
        step = self._step(event.job)
        step.job_ended = False
        if step.is_idle():
            step.running = False
        step.live_turns += 1
        step.turns += 1
        if event.base_model not in step.base_models:
            step.base_models.add(event.base_model)
            if step.seeding:
                self._start_all(step, again=True)
        self._advance(step)

    def _close_turn(self, event: TurnClosed) -> None:
        step = self._step(event.job)
        step.live_turns -= 1
        step.tokens += event.tokens
        step.last_response_s = event.now_s
        self._forget_if_done(step)

    # ---- trainers ----
    def _withdraw(self, trainer: WorkerId) -> None:
        """The trainer no longer wants devices."""
        self._wanting.pop(trainer, None)
        self._asking.pop(trainer, None)
        self._advance_all()

    def _request_devices(self, trainer: WorkerId, job: JobId | None) -> None:
        self._wanting[trainer] = self._asking[trainer] = job
        if job is not None:
            self._step(job).trains = True
        self._grant_all()
        if trainer in self._asking:
            seeding = self._seeding_jobs()
            self._commands.extend(TrainerWanted(self._now_s, name) for name in seeding)

    def _grant_all(self) -> None:
        """Grant the devices to all trainers that ask, once no local engine has them."""
        if self._seeding_jobs() or self._leaving:
            return
        for trainer, job in list(self._asking.items()):
            del self._asking[trainer]
            del self._wanting[trainer]
            self._holders[trainer] = job
            self._end_waits()
            self._commands.append(events.DevicesGranted(self._now_s, trainer, job))

    def _end_waits(self) -> None:
        for step in self._steps.values():
            step.end_wait(self._now_s)

    def _return_devices(self, event: events.DevicesReturned) -> None:
        job = self._holders.pop(event.trainer, None)
        if job is not None and (step := self._steps.get(job)) is not None:
            step.train_s += event.elapsed_s
            step.trained_tokens += event.trained_tokens
            if event.ends_step and step.running:
                self._end_step(step)
        self._advance_all()

    # ---- steps ----
    def _step(self, job: JobId) -> RolloutStep:
        step = self._steps.get(job)
        if step is None:
            step = self._steps[job] = RolloutStep(job)
        return step

    def _check_step(self, job: JobId) -> None:
        """The job's timer fired."""
        step = self._steps.get(job)
        if step is not None:
            if step.seeding:
                self._start_all(step, again=True)
            self._advance(step)

    def _advance_all(self) -> None:
        for step in list(self._steps.values()):
            self._advance(step)

    def _advance(self, step: RolloutStep) -> None:
        """If turns are live and trainers idle, begin the step; if it runs, its trainer waits."""
        if not self._engines or not step.live_turns or step.seeding:
            return
        if self._holders or self._wanting:
            return
        if not any(step.can_use(spec) for spec in self._engines.values()):
            return
        if step.running:
            self._report_wait(step)
            return
        step.begin()
        began = StepBegan(self._now_s, step.job, step.number, step.expected_turns)
        self._commands.append(began)
        self._seed(step, again=False)

    def _report_wait(self, step: RolloutStep) -> None:
        """Report that the trainer waits, now and as long as it does."""
        if step.waits_since_s is None:
            step.waits_since_s = self._now_s
        self._set_timer(STEP + step.job, WAIT_REPORT_S)
        waits = TrainerWaits(self._now_s, step.job, step.training_tokens(), step.train_s)
        self._commands.append(waits)

    def _end_step(self, step: RolloutStep) -> None:
        step.running = False
        if not step.announced:
            step.expected_turns = max(step.turns - step.live_turns, 1)
        self._commands.append(
            StepEnded(
                self._now_s,
                step.job,
                step.number,
                step.trained_tokens or step.tokens,
                step.train_s,
                step.waited_s,
                0.0 if step.live_turns else self._now_s - step.last_response_s,
            )
        )

    def _end_job(self, job: JobId) -> None:
        """The job's last turn returns what its step holds, and the step is forgotten."""
        step = self._steps.get(job)
        if step is not None:
            step.job_ended, step.trains = True, False
            self._forget_if_done(step)

    def _forget_if_done(self, step: RolloutStep) -> None:
        if step.job_ended and not step.live_turns:
            self._commands.append(StepDropped(self._now_s, step.job))
        if step.can_forget():
            del self._steps[step.job]

    def _set_timer(self, name: str, after_s: float) -> None:
        self._commands.append(SetTimer(name, self._now_s + after_s))

    def check_integrity(self) -> None:
        assert self._started <= self._engines.keys(), "an engine that is gone is started"
        assert self._asking.keys() <= self._wanting.keys(), "a trainer asks without wanting"
        asking = list(self._asking)
        held = self._seeding_jobs() or self._leaving
        assert not asking or held, f"{asking} wait for devices that nobody holds"
        assert not self._leaving.keys() & self._started, f"{self._leaving} leave and work"
        for name in self._started:
            assert self._jobs_seeding_on(self._engines[name]), f"{name} works unasked"
        for job, step in self._steps.items():
            assert step.job == job
            assert step.live_turns >= 0, f"{job}: more turns ended than began"
            assert step.running or not step.seeding, f"{job} seeds without a step"
            assert not (step.seeding and self._holders), f"{job} seeds where {self._holders} train"
            assert not step.can_forget(), f"{job} should have been forgotten"
