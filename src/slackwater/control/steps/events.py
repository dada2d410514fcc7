"""What can happen to the trainers' devices and to steps. Plain data, so that a record of it can be
replayed.
"""

from dataclasses import dataclass

from slackwater.control.jobs.events import JobEnded
from slackwater.control.operations.commands import StartWork
from slackwater.control.operations.events import TrainerLost
from slackwater.control.rollout.events import InstanceLost
from slackwater.control.rollout.facts import InstanceReleased, TurnClosed, TurnOpened
from slackwater.control.timer import TimerFired
from slackwater.model.ids import JobId, WorkerId
from slackwater.model.instance import InstanceSpec


@dataclass(frozen=True, slots=True)
class LocalEngineUp:
    """An engine on the trainers' devices is up, and rests until it is started."""

    now_s: float
    spec: InstanceSpec


@dataclass(frozen=True, slots=True)
class StepExpected:
    """Whoever drives the job says how many turns its next step will have."""

    now_s: float
    job: JobId
    turns: int


@dataclass(frozen=True, slots=True)
class DevicesWanted:
    """The trainer has work: `DevicesAsked` or `DevicesUnwanted` follows. Until then no local
    engine starts.

    `job` says whose devices; it may be left out where all jobs share the same.
    """

    now_s: float
    trainer: WorkerId
    job: JobId | None = None


@dataclass(frozen=True, slots=True)
class DevicesUnwanted:
    """The trainer has no work after all."""

    now_s: float
    trainer: WorkerId


@dataclass(frozen=True, slots=True)
class DevicesAsked:
    """The trainer could begin its work, for this job, at once."""

    now_s: float
    trainer: WorkerId
    job: JobId | None


@dataclass(frozen=True, slots=True)
class DevicesReturned:
    """The trainer has done what it was granted the devices for; an optim_step `ends_step`."""

    now_s: float
    trainer: WorkerId
    elapsed_s: float = 0.0
    ends_step: bool = False
    trained_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DevicesGranted:
    """From the step tracker: the trainer has the devices for the job until it returns them."""

    now_s: float
    trainer: WorkerId
    job: JobId | None = None


@dataclass(frozen=True, slots=True)
class SeedingChanged:
    """From the rollout manager: seeding for the job ended, or goes on again."""

    now_s: float
    job: JobId
    seeds: bool


TrainerEvent = (
    DevicesWanted | DevicesUnwanted | DevicesAsked | DevicesReturned | StartWork | TrainerLost
)
StepEvent = (
    LocalEngineUp
    | InstanceLost
    | InstanceReleased
    | StepExpected
    | TurnOpened
    | TurnClosed
    | TrainerEvent
    | SeedingChanged
    | JobEnded
    | TimerFired
)

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in StepEvent.__args__}
