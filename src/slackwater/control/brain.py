"""The brain of one fleet: rollout manager, weight director, step book, job book, driver book and phase keeper, passing each other's messages on at once.

    commands = brain.handle(event)

To its body it is one controller: an event for any of them goes in, what they say to each other stays inside, in order, and
what is left is for the body. Live and simulated bodies drive the same brain, and one record replays it whole.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, assert_never

from slackwater.control.coschedule import commands as phase_do
from slackwater.control.coschedule import events as of_schedule
from slackwater.control.coschedule import phase_events as of_phase
from slackwater.control.coschedule.phase_commands import PhaseCommand
from slackwater.control.coschedule.phase_limits import PhaseLimits
from slackwater.control.coschedule.phases import COSCHEDULE, PhaseKeeper, Said
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.control.jobs import commands as job_do
from slackwater.control.jobs import driver_events as of_driver
from slackwater.control.jobs import events as of_job
from slackwater.control.jobs.book import JobBook
from slackwater.control.jobs.driver_commands import DriverCommand
from slackwater.control.jobs.drivers import DriverBook
from slackwater.control.rollout import commands as rollout_do
from slackwater.control.rollout import events as of_rollout
from slackwater.control.rollout.instances import InstanceRecord
from slackwater.control.rollout.manager import RolloutManager
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.steps import commands as step_do
from slackwater.control.steps import events as of_step
from slackwater.control.steps.book import STEP, StepBook
from slackwater.control.timer import TimerFired
from slackwater.control.weights import commands as weight_do
from slackwater.control.weights import events as of_weight
from slackwater.control.weights.director import WeightDirector
from slackwater.model.ids import InstanceId, JobId, NodeId

BrainEvent: TypeAlias = (
    of_rollout.RolloutEvent
    | of_weight.WeightEvent
    | of_step.StepEvent
    | of_job.JobEvent
    | of_driver.DriverEvent
    | of_schedule.Event
    | of_phase.PhaseEvent
)
BrainCommand: TypeAlias = (
    rollout_do.RolloutCommand
    | weight_do.WeightCommand
    | step_do.StepCommand
    | job_do.JobCommand
    | DriverCommand
    | phase_do.Command
    | PhaseCommand
)

EVENT_TYPES: dict[str, type] = {
    **of_rollout.EVENT_TYPES,
    **of_weight.EVENT_TYPES,
    **of_step.EVENT_TYPES,
    **of_job.EVENT_TYPES,
    **of_driver.EVENT_TYPES,
    **of_schedule.EVENT_TYPES,
    **of_phase.EVENT_TYPES,
}


class Brain:
    """See the module. The parts may be looked at, never told anything but through here."""

    def __init__(
        self,
        settings: RolloutSettings | None = None,
        *,
        profiles_jobs: bool = False,
        shared_devices: bool = True,
        coscheduler: CoScheduler | None = None,
        limits: PhaseLimits | None = None,
    ) -> None:
        """With a `coscheduler` jobs that have terms share nodes phase by phase, within `limits`."""
        self.rollout = RolloutManager(settings)
        self.weights = WeightDirector()
        self.steps = StepBook(shared=shared_devices)
        profiles = profiles_jobs or coscheduler is not None
        self.jobs = JobBook(profiles=profiles, idle_after_s=(limits or PhaseLimits()).gone_s)
        self.drivers = DriverBook()
        self.phases: PhaseKeeper | None = None
        if coscheduler is not None:
            self.phases = PhaseKeeper(coscheduler, self._engines_on, limits)
        self._takers: dict[type, Callable[[Any], Sequence[BrainCommand | Said]]] = {
            **dict.fromkeys(of_rollout.EVENT_TYPES.values(), self.rollout.handle),
            **dict.fromkeys(of_weight.EVENT_TYPES.values(), self.weights.handle),
            **dict.fromkeys(of_step.EVENT_TYPES.values(), self.steps.handle),
            **dict.fromkeys(of_job.EVENT_TYPES.values(), self.jobs.handle),
            **dict.fromkeys(of_driver.EVENT_TYPES.values(), self.drivers.handle),
            **dict.fromkeys(of_schedule.EVENT_TYPES.values(), self._phases_told),
            **dict.fromkeys(of_phase.EVENT_TYPES.values(), self._phases_told),
            TimerFired: self._timer_fired,
        }

    def handle(self, event: BrainEvent) -> Sequence[BrainCommand]:
        """Take one event; return what the body must do, in order."""
        if type(event) is of_rollout.TokensArrived:  # the short way: most frames ask for nothing
            commands = self.rollout.handle(event)
            if not commands:
                return commands
            return self._settled(deque(), commands, event.now_s)
        return self._settled(deque((event,)), (), event.now_s)

    def _settled(
        self, inbox: deque[BrainEvent], commands: Sequence[BrainCommand], now_s: float
    ) -> list[BrainCommand]:
        """Let the parts talk until nobody has anything more to say to another."""
        out: list[BrainCommand] = []
        self._pass_on(commands, now_s, inbox, out)
        while inbox:
            self._pass_on(self._told(inbox.popleft(), inbox), now_s, inbox, out)
        return out

    def _told(self, event: BrainEvent, inbox: deque[BrainEvent]) -> Sequence[BrainCommand | Said]:
        match event:
            case of_job.IterationDone(now_s, job):
                inbox.append(of_driver.DriverProgressed(now_s, job))
            case of_job.JobEnded(now_s, job):
                inbox.append(of_step.StepsOver(now_s, job))
            case of_rollout.InstanceJoined(now_s, spec):
                local = self.steps.is_local(spec.instance)
                if local and not self.steps.works(spec.instance):
                    return ()  # it was let go while it was being started
                inbox.append(of_weight.HolderJoined(now_s, spec))
            case of_rollout.InstanceHeartbeat(_, instance):
                if self.steps.is_local(instance) and not self.steps.works(instance):
                    return ()
            case of_rollout.InstanceLost(now_s, instance):
                inbox.append(of_weight.HolderLeft(now_s, instance))
                if self.steps.is_local(instance):
                    inbox.append(of_step.LocalEngineDown(now_s, instance))
            case _:
                pass
        commands = self._takers[type(event)](event)
        return commands if self.phases is None else [*commands, *_after(self.phases, event)]

    def _phases_told(self, event: Any) -> Sequence[Said]:
        """Without a co-scheduler nobody takes phases."""
        return () if self.phases is None else self.phases.handle(event)

    def _timer_fired(self, event: TimerFired) -> Sequence[BrainCommand | Said]:
        """The timer's name says whose it is."""
        if event.name.startswith(COSCHEDULE):
            return self._phases_told(event)
        part = self.steps if event.name.startswith(STEP) else self.rollout
        return part.handle(event)

    def _pass_on(
        self,
        commands: Sequence[BrainCommand | Said],
        now_s: float,
        inbox: deque[BrainEvent],
        out: list[BrainCommand],
    ) -> None:
        """What one part says to another becomes its event; the rest is for the body."""
        for command in commands:
            if self._phases_take(command, now_s, inbox, out):
                continue
            match command:
                case (
                    rollout_do.NeedVersion()
                    | rollout_do.FreeVersion()
                    | rollout_do.TurnOpened()
                    | rollout_do.TurnClosed()
                ):
                    inbox.extend(_meant(command, now_s))
                case rollout_do.ReleaseInstance(instance, reason):
                    local = self.steps.is_local(instance)
                    inbox.append(of_weight.HolderLeft(now_s, instance, rests=local))
                    if local:
                        inbox.append(of_step.EngineRested(now_s, instance))
                        out.append(step_do.RestEngine(instance, reason))
                    else:
                        out.append(command)
                case rollout_do.EndSeeding(job):
                    inbox.append(of_step.SeedingChanged(now_s, job, False))
                    out.append(command)
                case rollout_do.ResumeSeeding(job):
                    inbox.append(of_step.SeedingChanged(now_s, job, True))
                    out.append(command)
                case (
                    weight_do.OfferVersion() | weight_do.RecallVersion() | weight_do.BlameInstance()
                ):
                    inbox.append(_told_of_weights(command, now_s))
                case (
                    of_rollout.JobGated()
                    | of_job.JobAnswered()
                    | of_job.JobProfiled()
                    | of_job.IterationDone()
                    | of_job.JobSubmitted()
                    | of_job.JobCrashed()
                    | of_job.JobEnded()
                    | of_rollout.StepBegan()
                    | of_rollout.TrainerWanted()
                    | of_rollout.TrainerWaits()
                    | of_rollout.StepEnded()
                    | of_rollout.StepDropped()
                ):
                    inbox.append(command)
                case job_do.DriverMayRun(job):
                    inbox.append(of_driver.DriverDue(now_s, job))
                case job_do.DriverMustEnd(job, stage, reason):
                    inbox.append(of_driver.DriverUndue(now_s, job, stage, reason))
                case _:
                    out.append(command)

    def _phases_take(
        self,
        command: BrainCommand | Said,
        now_s: float,
        inbox: deque[BrainEvent],
        out: list[BrainCommand],
    ) -> bool:
        """Let the phase keeper hear it first; whether it was for that one alone."""
        if self.phases is None:
            return False
        self._pass_on(_heard_by(self.phases, command, now_s), now_s, inbox, out)
        return _is_its_own(command)

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant of one part, or one between two, does not hold."""
        self.rollout.check_integrity()
        self.weights.check_integrity()
        self.steps.check_integrity()
        self.jobs.check_integrity()
        self.drivers.check_integrity()
        if self.phases is not None:
            self.phases.check_integrity()
        for record in self.rollout.books.instances:
            instance = record.spec.instance
            usable = self.weights.usable(instance)
            assert record.versions == usable, f"{instance}: {record.versions} offered as {usable}"
            local = self.steps.is_local(instance)
            assert not local or self.steps.works(instance), f"{instance} works unasked"
        for version, turns in self.rollout.books.demand.counts().items():
            assert self.weights.knows(version), f"{turns} turns ask for {version}, which is gone"

    def _engines_on(self, nodes: Sequence[NodeId], job: JobId) -> list[InstanceId]:
        """Instances of nodes, those with most of a job's turns first."""
        found = [
            record
            for record in self.rollout.books.instances
            if record.spec.place in nodes and record.spec.job in (None, job)
        ]

        def rank(record: InstanceRecord) -> tuple[int, InstanceId]:
            mine = sum(turn.spec.job == job for turn in record.attempts.values())
            return -mine, record.spec.instance

        return [record.spec.instance for record in sorted(found, key=rank)]

    def gauges(self) -> dict[str, float]:
        """For metrics."""
        return {
            **{f"rollout_{name}": value for name, value in self.rollout.gauges().items()},
            **{f"weights_{name}": value for name, value in self.weights.gauges().items()},
        }


def _after(phases: PhaseKeeper, event: BrainEvent) -> Sequence[Said]:
    """What the phase keeper says to what happened to a job or an instance."""
    match event:
        case of_job.JobEnded(now_s, job):
            return phases.ended(job, now_s)
        case of_rollout.InstanceLost(now_s, instance):
            return phases.instance_failed(instance, now_s)
        case _:
            return ()


def _heard_by(
    phases: PhaseKeeper, command: BrainCommand | Said, now_s: float
) -> Sequence[BrainCommand | Said]:
    """What the phase keeper says to what another part said."""
    match command:
        case rollout_do.TurnOpened(job, _, sequence):
            return phases.turn_opened(job, sequence, now_s)
        case rollout_do.TurnClosed(job=job, sequence=sequence):
            return phases.turn_closed(job, sequence, now_s)
        case rollout_do.ReleaseInstance(instance) | rollout_do.ReportFault(instance):
            return phases.instance_failed(instance, now_s)
        case job_do.PlaceJob() if command.terms is not None:
            return phases.place(command, now_s)
        case job_do.ProfileJob():
            return phases.profile(command, now_s)
        case _:
            return ()


def _is_its_own(command: BrainCommand | Said) -> bool:
    """Whether the phase keeper alone takes it."""
    return isinstance(command, job_do.PlaceJob | job_do.ProfileJob) and command.terms is not None


def _meant(
    command: rollout_do.NeedVersion
    | rollout_do.FreeVersion
    | rollout_do.TurnOpened
    | rollout_do.TurnClosed,
    now_s: float,
) -> list[BrainEvent]:
    """What the rollout manager said to the others."""
    match command:
        case rollout_do.NeedVersion(job, base_model, version, turns, waiting):
            return [of_weight.VersionNeeded(now_s, job, base_model, version, turns, waiting)]
        case rollout_do.FreeVersion(instance, version):
            return [of_weight.VersionFreed(now_s, instance, version)]
        case rollout_do.TurnOpened(job, base_model):
            opened = of_step.LiveTurnsChanged(now_s, job, base_model, True)
            return [opened, of_job.JobWorked(now_s, job)]
        case rollout_do.TurnClosed(job, base_model, prompt_tokens, tokens):
            used = (prompt_tokens, tokens, command.device_s, command.waited_s)
            return [
                of_step.LiveTurnsChanged(now_s, job, base_model, False, tokens),
                of_job.JobWorked(now_s, job, 1, command.completed, *used),
            ]
        case _:
            assert_never(command)


def _told_of_weights(
    command: weight_do.OfferVersion | weight_do.RecallVersion | weight_do.BlameInstance,
    now_s: float,
) -> of_rollout.RolloutEvent:
    """What the weight director said to the rollout manager."""
    match command:
        case weight_do.OfferVersion(instance, version):
            return of_rollout.VersionOffered(now_s, instance, version)
        case weight_do.RecallVersion(instance, version):
            return of_rollout.VersionRecalled(now_s, instance, version)
        case weight_do.BlameInstance(instance, what):
            return of_rollout.InstanceBlamed(now_s, instance, what)
        case _:
            assert_never(command)
