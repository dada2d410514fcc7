"""The brain of one fleet: rollout manager, weight director, step book, job book and driver book, passing each other's messages on at once.

    commands = brain.handle(event)

To its body it is one controller: an event for any of them goes in, what they say to each other stays inside, in order, and
what is left is for the body. Live and simulated bodies drive the same brain, and one record replays it whole.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, assert_never

from slackwater.control.jobs import commands as job_do
from slackwater.control.jobs import driver_events as of_driver
from slackwater.control.jobs import events as of_job
from slackwater.control.jobs.book import JobBook
from slackwater.control.jobs.driver_commands import DriverCommand
from slackwater.control.jobs.drivers import DriverBook
from slackwater.control.rollout import commands as rollout_do
from slackwater.control.rollout import events as of_rollout
from slackwater.control.rollout.manager import RolloutManager
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.steps import commands as step_do
from slackwater.control.steps import events as of_step
from slackwater.control.steps.book import STEP, StepBook
from slackwater.control.timer import TimerFired
from slackwater.control.weights import commands as weight_do
from slackwater.control.weights import events as of_weight
from slackwater.control.weights.director import WeightDirector

BrainEvent: TypeAlias = (
    of_rollout.RolloutEvent
    | of_weight.WeightEvent
    | of_step.StepEvent
    | of_job.JobEvent
    | of_driver.DriverEvent
)
BrainCommand: TypeAlias = (
    rollout_do.RolloutCommand
    | weight_do.WeightCommand
    | step_do.StepCommand
    | job_do.JobCommand
    | DriverCommand
)

EVENT_TYPES: dict[str, type] = {
    **of_rollout.EVENT_TYPES,
    **of_weight.EVENT_TYPES,
    **of_step.EVENT_TYPES,
    **of_job.EVENT_TYPES,
    **of_driver.EVENT_TYPES,
}


class Brain:
    """See the module. The parts may be looked at, never told anything but through here."""

    def __init__(
        self,
        settings: RolloutSettings | None = None,
        *,
        profiles_jobs: bool = False,
        shared_devices: bool = True,
    ) -> None:
        self.rollout = RolloutManager(settings)
        self.weights = WeightDirector()
        self.steps = StepBook(shared=shared_devices)
        self.jobs = JobBook(profiles=profiles_jobs)
        self.drivers = DriverBook()
        self._takers: dict[type, Callable[[Any], Sequence[BrainCommand]]] = {
            **dict.fromkeys(of_rollout.EVENT_TYPES.values(), self.rollout.handle),
            **dict.fromkeys(of_weight.EVENT_TYPES.values(), self.weights.handle),
            **dict.fromkeys(of_step.EVENT_TYPES.values(), self.steps.handle),
            **dict.fromkeys(of_job.EVENT_TYPES.values(), self.jobs.handle),
            **dict.fromkeys(of_driver.EVENT_TYPES.values(), self.drivers.handle),
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

    def _told(self, event: BrainEvent, inbox: deque[BrainEvent]) -> Sequence[BrainCommand]:
        match event:
            case of_job.IterationDone(now_s, job):
                inbox.append(of_driver.DriverProgressed(now_s, job))
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
        return self._takers[type(event)](event)

    def _timer_fired(self, event: TimerFired) -> Sequence[BrainCommand]:
        """The timer's name says whose it is."""
        part = self.steps if event.name.startswith(STEP) else self.rollout
        return part.handle(event)

    def _pass_on(
        self,
        commands: Sequence[BrainCommand],
        now_s: float,
        inbox: deque[BrainEvent],
        out: list[BrainCommand],
    ) -> None:
        """What one part says to another becomes its event; the rest is for the body."""
        for command in commands:
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
                case rollout_do.EndSeeding(base_model):
                    inbox.append(of_step.SeedingChanged(now_s, base_model, False))
                    out.append(command)
                case rollout_do.ResumeSeeding(base_model):
                    inbox.append(of_step.SeedingChanged(now_s, base_model, True))
                    out.append(command)
                case (
                    weight_do.OfferVersion() | weight_do.RecallVersion() | weight_do.BlameInstance()
                ):
                    inbox.append(_told_of_weights(command, now_s))
                case (
                    of_rollout.StepBegan()
                    | of_rollout.TrainerWanted()
                    | of_rollout.TrainerWaits()
                    | of_rollout.StepEnded()
                ):
                    inbox.append(command)
                case job_do.DriverMayRun(job):
                    inbox.append(of_driver.DriverDue(now_s, job))
                case job_do.DriverMustEnd(job, stage, reason):
                    inbox.append(of_driver.DriverUndue(now_s, job, stage, reason))
                case of_job.JobSubmitted() | of_job.JobCrashed() | of_job.JobEnded():
                    inbox.append(command)
                case _:
                    out.append(command)

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant of one part, or one between two, does not hold."""
        self.rollout.check_integrity()
        self.weights.check_integrity()
        self.steps.check_integrity()
        self.jobs.check_integrity()
        self.drivers.check_integrity()
        for record in self.rollout.books.instances:
            instance = record.spec.instance
            usable = self.weights.usable(instance)
            assert record.versions == usable, f"{instance}: {record.versions} offered as {usable}"
            local = self.steps.is_local(instance)
            assert not local or self.steps.works(instance), f"{instance} works unasked"
        for version, turns in self.rollout.books.demand.counts().items():
            assert self.weights.knows(version), f"{turns} turns ask for {version}, which is gone"

    def gauges(self) -> dict[str, float]:
        """For metrics."""
        return {
            **{f"rollout_{name}": value for name, value in self.rollout.gauges().items()},
            **{f"weights_{name}": value for name, value in self.weights.gauges().items()},
        }


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
            opened = of_step.LiveTurnsChanged(now_s, base_model, True)
            return [opened, of_job.JobWorked(now_s, job)]
        case rollout_do.TurnClosed(job, base_model, prompt_tokens, tokens):
            used = (prompt_tokens, tokens, command.device_s, command.waited_s)
            return [
                of_step.LiveTurnsChanged(now_s, base_model, False, tokens),
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
