"""The step tracker: who has the trainers' devices, and when a step begins and ends (RLBoost 4.2).

Local engines and trainers share devices, so only one kind works at a time. A job's step begins with
its first turn while no trainer works, and ends with its optim_step; a job that never trains ends it
with its turns. How long local engines roll out is the rollout manager's decision
(`SeedingChanged`); an engine works as long as one of its jobs seeds. Without local engines every
request for devices is granted at once. All jobs share one set of devices.

An engine that sleeps holds the devices until it says that it has left them. One that has not said
so in `REST_S` is ended, and its loss frees them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from slackwater.control.devices.messages import DeviceCommand, DeviceEvent, GrantDevices
from slackwater.control.jobs.events import JobEnded, JobTrained
from slackwater.control.operations.commands import RunOp, StartWork
from slackwater.control.operations.events import (
    OpSubmitted,
    TicketDetached,
    TicketDone,
    TicketFailed,
    TrainerLost,
)
from slackwater.control.operations.facts import OpOver
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
from slackwater.control.steps import commands as do
from slackwater.control.steps import events as on
from slackwater.control.steps.step import RolloutStep, users
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import InstanceId, JobId, RequestId, WorkerId
from slackwater.model.instance import InstanceSpec
from slackwater.model.operation import OpKind

NAG_S = 5.0
RESTART_S = 1.0
REST_S = 60.0  # a server copies its weights to the host meanwhile
STEP = "step:"  # of the names of its timers; a job follows
REST = "rest:"  # an instance follows

Out = list[do.StepCommand]


class StepTracker:
    """See the module. `check_integrity()` holds after every event."""

    def __init__(self) -> None:
        self._engines: dict[InstanceId, InstanceSpec] = {}
        self._at_work: set[InstanceId] = set()
        self._rests = 0
        self._leaving: dict[InstanceId, int] = {}  # told to rest by this order; still there
        self._steps: dict[JobId, RolloutStep] = {}
        self._busy: dict[WorkerId, JobId | None] = {}
        self._wanting: dict[WorkerId, JobId | None] = {}
        self._asking: dict[WorkerId, JobId | None] = {}

    def handle(self, event: on.StepEvent) -> Sequence[do.StepCommand]:
        """Take one event; return what is to be done, in order."""
        out: Out = []
        now_s = event.now_s
        match event:
            case on.LocalEngineUp() | on.EngineRested() | InstanceReleased() | InstanceLost():
                self._of_engines(event, out)
            case on.StepExpected(_, job, turns):
                step = self._step(job)
                step.expected_turns, step.announced = max(turns, 1), True
            case TurnOpened():
                self._turn_opened(event, out)
            case TurnClosed():
                self._turn_closed(event, out)
            case on.SeedingChanged(_, job, seeds):
                self._seeding_changed(self._step(job), seeds, now_s, out)
            case JobEnded(_, job):
                self._over(job, now_s, out)
            case TimerFired(_, name) if name.startswith(REST):
                self._end_restless(InstanceId(name.removeprefix(REST)), now_s, out)
            case TimerFired(_, name):
                self._timer(JobId(name.removeprefix(STEP)), now_s, out)
            case _:
                self._of_trainers(event, out)
        return out

    def _of_engines(self, event: on.EngineEvent, out: Out) -> None:
        now_s = event.now_s
        match event:
            case on.LocalEngineUp(_, spec):
                self._engine_up(spec, now_s, out)
            case on.EngineRested(_, instance, number):
                if self._leaving.get(instance) == number:
                    self._left(instance, now_s, out)
            case InstanceReleased(_, instance, _, reason):
                if instance in self._engines:
                    self._stops(instance, now_s, out)
                    self._rest(instance, reason, now_s, out)
            case InstanceLost(_, instance):
                if self._engines.pop(instance, None) is not None:
                    self._stops(instance, now_s, out)
                self._left(instance, now_s, out)

    def _of_trainers(self, event: on.TrainerEvent, out: Out) -> None:
        now_s = event.now_s
        match event:
            case on.DevicesWanted(_, trainer, job) | StartWork(_, trainer, job):
                self._wanting[trainer] = job
                self._end_waits(now_s)
            case on.DevicesUnwanted(_, trainer) | TrainerLost(_, trainer):
                self._gives_up(trainer, isinstance(event, TrainerLost), now_s, out)
            case on.DevicesAsked(_, trainer, job):
                self._asked(trainer, job, now_s, out)
            case on.DevicesReturned():
                self._returned(event, out)
            case _:
                assert_never(event)

    # ---- questions ----
    def is_local(self, instance: InstanceId) -> bool:
        """Whether it is an engine on the trainers' devices."""
        return instance in self._engines

    def works(self, instance: InstanceId) -> bool:
        """Whether it was started, and not let go since."""
        return instance in self._at_work

    def resting(self) -> list[InstanceSpec]:
        """Local engines that do not work now."""
        return [spec for name, spec in self._engines.items() if name not in self._at_work]

    def holders(self) -> dict[WorkerId, JobId | None]:
        """Trainers that hold the devices, and for which job."""
        return dict(self._busy)

    def jobs(self) -> list[JobId]:
        """Jobs of which it remembers a step."""
        return list(self._steps)

    def _seeding(self) -> list[JobId]:
        return [step.job for step in self._steps.values() if step.seeding]

    # ---- local engines ----
    def _engine_up(self, spec: InstanceSpec, now_s: float, out: Out) -> None:
        self._engines[spec.instance] = spec
        self._at_work.discard(spec.instance)
        if users(self._steps.values(), spec):
            self._start(spec, out, again=True)
        elif spec.sleeps:
            self._rest(spec.instance, "it has just come up", now_s, out)
        for step in list(self._steps.values()):
            if step.uses(spec):
                self._look(step, now_s, out)

    def _stops(self, instance: InstanceId, now_s: float, out: Out) -> None:
        """It is gone or was released. If seeding goes on, it is started again."""
        self._at_work.discard(instance)
        spec = self._engines.get(instance)
        if spec is not None and (seeding := users(self._steps.values(), spec)):
            out.append(SetTimer(STEP + seeding[0].job, now_s + RESTART_S))

    def _rest(self, instance: InstanceId, reason: str, now_s: float, out: Out) -> None:
        number = None
        if self._engines[instance].sleeps:
            self._rests += 1
            number = self._leaving[instance] = self._rests
            out.append(SetTimer(REST + instance, now_s + REST_S))
        out.append(do.RestEngine(instance, reason, number))

    def _left(self, instance: InstanceId, now_s: float, out: Out) -> None:
        """It has left the devices, if it was to."""
        if self._leaving.pop(instance, None) is not None:
            self._grant_all(now_s, out)

    def _end_restless(self, instance: InstanceId, now_s: float, out: Out) -> None:
        """It should have rested by now: end it, as often as needed; then it is lost."""
        if instance in self._leaving:
            self._engines.pop(instance, None)
            out.append(ReleaseInstance(instance, f"it did not rest in {REST_S:g} s"))
            out.append(SetTimer(REST + instance, now_s + REST_S))

    def _timer(self, job: JobId, now_s: float, out: Out) -> None:
        step = self._steps.get(job)
        if step is None:
            return
        if step.seeding:
            self._start_all(step, out, again=True)
        self._look(step, now_s, out)

    def _start_all(self, step: RolloutStep, out: Out, *, again: bool) -> None:
        for name, spec in self._engines.items():
            if name not in self._at_work and step.uses(spec):
                self._start(spec, out, again=again)

    def _start(self, spec: InstanceSpec, out: Out, *, again: bool) -> None:
        self._at_work.add(spec.instance)
        self._leaving.pop(spec.instance, None)
        out.append(do.StartEngine(spec, again))

    def _seed(self, step: RolloutStep, now_s: float, out: Out, *, again: bool) -> None:
        assert not self._busy, f"{self._busy} hold what local engines get"
        step.seeding = True
        step.end_wait(now_s)
        self._start_all(step, out, again=again)

    def _seeding_changed(self, step: RolloutStep, seeds: bool, now_s: float, out: Out) -> None:
        if seeds:
            self._seed(step, now_s, out, again=True)
            return
        step.seeding = False
        # Those that are still being started have not joined the manager, which cannot let them go.
        steps = self._steps.values()
        for name in sorted(self._at_work):
            if users(steps, self._engines[name]):
                continue
            self._at_work.remove(name)
            if self._engines[name].sleeps:
                self._rest(name, "its seeding has ended", now_s, out)
        self._grant_all(now_s, out)
        # Only after the trainers have heard of it do they wait: they may have work. Other jobs'
        # turns may have lost their engine.
        waiting = [each.job for each in steps if each.live_turns and not each.seeding]
        out.extend(SetTimer(STEP + job, now_s) for job in waiting)
        if step.forgettable():
            del self._steps[step.job]

    # ---- turns ----
    def _turn_opened(self, event: TurnOpened, out: Out) -> None:
        step = self._step(event.job)
        step.over = False
        if step.idle():
            step.running = False
        step.live_turns += 1
        step.turns += 1
        if event.base_model not in step.base_models:
            step.base_models.add(event.base_model)
            if step.seeding:
                self._start_all(step, out, again=True)
        self._look(step, event.now_s, out)

    def _turn_closed(self, event: TurnClosed, out: Out) -> None:
        step = self._step(event.job)
        step.live_turns -= 1
        step.tokens += event.tokens
        step.last_response_s = event.now_s
        self._forget(step, event.now_s, out)

    # ---- trainers ----
    def _gives_up(self, trainer: WorkerId, gone: bool, now_s: float, out: Out) -> None:
        """It wants nothing more; one that is gone holds nothing either."""
        self._wanting.pop(trainer, None)
        self._asking.pop(trainer, None)
        if gone:
            self._busy.pop(trainer, None)
        self._look_at_all(now_s, out)

    def _asked(self, trainer: WorkerId, job: JobId | None, now_s: float, out: Out) -> None:
        self._wanting[trainer] = self._asking[trainer] = job
        if job is not None:
            self._step(job).trains = True
        self._grant_all(now_s, out)
        if trainer in self._asking:
            out.extend(TrainerWanted(now_s, name) for name in self._seeding())

    def _grant_all(self, now_s: float, out: Out) -> None:
        """Grant devices that no local engine has; trainers do not share among each other."""
        if self._seeding() or self._leaving:
            return
        for trainer, job in list(self._asking.items()):
            del self._asking[trainer]
            del self._wanting[trainer]
            self._busy[trainer] = job
            self._end_waits(now_s)
            out.append(on.DevicesGranted(now_s, trainer, job))

    def _end_waits(self, now_s: float) -> None:
        for step in self._steps.values():
            step.end_wait(now_s)

    def _returned(self, event: on.DevicesReturned, out: Out) -> None:
        job = self._busy.pop(event.trainer, None)
        if job is not None and (step := self._steps.get(job)) is not None:
            step.train_s += event.elapsed_s
            step.trained_tokens += event.trained_tokens
            if event.ends_step and step.running:
                self._end(step, event.now_s, out)
        self._look_at_all(event.now_s, out)

    # ---- steps ----
    def _step(self, job: JobId) -> RolloutStep:
        step = self._steps.get(job)
        if step is None:
            step = self._steps[job] = RolloutStep(job)
        return step

    def _look_at_all(self, now_s: float, out: Out) -> None:
        for step in list(self._steps.values()):
            self._look(step, now_s, out)

    def _look(self, step: RolloutStep, now_s: float, out: Out) -> None:
        """Turns are live and trainers idle: a step begins, or the running one's trainer waits."""
        if not step.live_turns or step.seeding or self._busy or self._wanting:
            return
        if not any(step.uses(spec) for spec in self._engines.values()):
            return
        if step.running:
            self._trainer_waits(step, now_s, out)
            return
        step.begin()
        out.append(StepBegan(now_s, step.job, step.number, step.expected_turns))
        self._seed(step, now_s, out, again=False)

    def _trainer_waits(self, step: RolloutStep, now_s: float, out: Out) -> None:
        """Say that the trainer waits, now and as long as it does."""
        if step.waits_since_s is None:
            step.waits_since_s = now_s
        out.append(SetTimer(STEP + step.job, now_s + NAG_S))
        out.append(TrainerWaits(now_s, step.job, step.trained(), step.train_s))

    def _end(self, step: RolloutStep, now_s: float, out: Out) -> None:
        step.running = False
        if not step.announced:
            step.expected_turns = max(step.turns - step.live_turns, 1)
        remote_waited_s = 0.0 if step.live_turns else now_s - step.last_response_s
        out.append(
            StepEnded(
                *(now_s, step.job, step.number, step.trained_tokens or step.tokens),
                *(step.train_s, step.waited_s, remote_waited_s),
            )
        )

    def _over(self, job: JobId, now_s: float, out: Out) -> None:
        """The job is over: with its last turn its step returns what it holds and is forgotten."""
        step = self._steps.get(job)
        if step is not None:
            step.over, step.trains = True, False
            self._forget(step, now_s, out)

    def _forget(self, step: RolloutStep, now_s: float, out: Out) -> None:
        if step.over and not step.live_turns:
            out.append(StepDropped(now_s, step.job))
        if step.forgettable():
            del self._steps[step.job]

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        steps = self._steps.values()
        assert self._at_work <= self._engines.keys(), "an engine that is gone is at work"
        assert self._asking.keys() <= self._wanting.keys(), "asks without wanting"
        asking = list(self._asking)
        held = self._seeding() or self._leaving
        assert not asking or held, f"{asking} wait for devices that nobody holds"
        assert not self._leaving.keys() & self._at_work, f"{self._leaving} leave and work"
        for name in self._at_work:
            assert users(steps, self._engines[name]), f"{name} works unasked"
        for job, step in self._steps.items():
            assert step.job == job
            assert step.live_turns >= 0, f"{job}: more turns ended than began"
            assert step.running or not step.seeding, f"{job} seeds without a step"
            assert not (step.seeding and self._busy), f"{job} seeds where {self._busy} train"
            assert not step.forgettable(), f"{job} should have been forgotten"


@dataclass(frozen=True, slots=True)
class _Work:
    """What a trainer does with its devices; an optimizer's step `ends_step`."""

    ticket: int
    job: JobId | None
    waited_s: float
    ends_step: bool


class DeviceOwnership:
    """A trainer's order leaves once the step tracker has granted its devices; what the trainer
    did with them is then on its job's account.
    """

    def __init__(self) -> None:
        self._waiting: dict[WorkerId, StartWork] = {}
        self._busy: dict[WorkerId, _Work] = {}
        self._submitted_s: dict[RequestId, float] = {}

    def handle(self, event: DeviceEvent) -> Sequence[DeviceCommand]:
        """Take one event; return what follows, in order."""
        match event:
            case OpSubmitted(now_s, operation):
                self._submitted_s[operation.request] = now_s
            case OpOver(_, _, request):
                self._submitted_s.pop(request, None)
            case StartWork(now_s, worker, job):
                self._waiting[worker] = event
                return (on.DevicesAsked(now_s, worker, job),)
            case on.DevicesGranted(now_s, trainer):
                return (self._granted(trainer, now_s),)
            case TrainerLost(_, worker):
                self._waiting.pop(worker, None)
                self._busy.pop(worker, None)
            case _:
                return self._returned(event)
        return ()

    def holders(self) -> dict[WorkerId, JobId | None]:
        """Trainers that were given an order, and for which job."""
        return {worker: work.job for worker, work in self._busy.items()}

    def _granted(self, trainer: WorkerId, now_s: float) -> DeviceCommand:
        work = self._waiting.pop(trainer, None)
        if work is None:
            return GrantDevices(trainer)
        order = work.order
        since_s, ends_step = now_s, False
        if isinstance(order, RunOp):
            since_s = self._submitted_s.pop(order.operation.request, now_s)
            ends_step = order.operation.kind is OpKind.OPTIM_STEP and not order.replay
        self._busy[trainer] = _Work(order.ticket, work.job, now_s - since_s, ends_step)
        return order

    def _returned(
        self, event: TicketDetached | TicketDone | TicketFailed
    ) -> Sequence[DeviceCommand]:
        """The trainer has done what it held the devices for; ignore reports on anything else."""
        work = self._busy.get(event.worker)
        if work is None or work.ticket != event.ticket:
            return ()
        del self._busy[event.worker]
        took_s = 0.0 if isinstance(event, TicketFailed) else event.elapsed_s
        ends_step = work.ends_step and isinstance(event, TicketDone)
        returned = on.DevicesReturned(event.now_s, event.worker, took_s, ends_step)
        if work.job is None:
            return (returned,)
        done = (work.job, took_s, work.waited_s, ends_step)
        return JobTrained(event.now_s, *done), returned

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        both = self._waiting.keys() & self._busy.keys()
        assert not both, f"{both} have an order and wait for another"
