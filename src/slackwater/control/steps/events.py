"""Events of the trainers' devices and of steps."""

from slackwater.control.jobs.events import JobEnded
from slackwater.control.message import TimedMessage
from slackwater.control.operations.commands import StartWork
from slackwater.control.operations.events import TrainerLost
from slackwater.control.rollout.events import InstanceLost
from slackwater.control.rollout.facts import InstanceReleased, TurnClosed, TurnOpened
from slackwater.control.timer import TimerFired
from slackwater.model.ids import InstanceId, JobId, WorkerId
from slackwater.model.instance import InstanceSpec


class LocalEngineUp(TimedMessage, frozen=True):
    """An engine on the trainers' devices is up, and rests until it is started."""

    spec: InstanceSpec


class EngineRested(TimedMessage, frozen=True):
    """The engine has left the devices, by the `RestEngine` of this number."""

    instance: InstanceId
    number: int


class StepExpected(TimedMessage, frozen=True):
    """The job's driver announces how many turns its next step will have."""

    job: JobId
    turns: int


class DevicesWanted(TimedMessage, frozen=True):
    """The trainer has work: no local engine starts until it is done, or `DevicesUnwanted`."""

    trainer: WorkerId
    job: JobId | None = None


class DevicesUnwanted(TimedMessage, frozen=True):
    """The trainer has no work after all."""

    trainer: WorkerId


class DevicesAsked(TimedMessage, frozen=True):
    """The trainer could begin its work for the job at once."""

    trainer: WorkerId
    job: JobId | None


class DevicesReturned(TimedMessage, frozen=True):
    """The trainer has finished its work and returns the devices; an optim_step `ends_step`."""

    trainer: WorkerId
    elapsed_s: float = 0.0
    ends_step: bool = False
    trained_tokens: int = 0


class DevicesGranted(TimedMessage, frozen=True):
    """From the step tracker: the trainer has the devices until it returns them."""

    trainer: WorkerId
    job: JobId | None = None


class SeedingChanged(TimedMessage, frozen=True):
    """From the rollout manager: seeding for the job ended, or begins again."""

    job: JobId
    seeds: bool


TrainerEvent = (
    DevicesWanted | DevicesUnwanted | DevicesAsked | DevicesReturned | StartWork | TrainerLost
)
EngineEvent = LocalEngineUp | EngineRested | InstanceLost | InstanceReleased
JobStepEvent = StepExpected | TurnOpened | TurnClosed | SeedingChanged | JobEnded
StepEvent = EngineEvent | JobStepEvent | TrainerEvent | TimerFired
