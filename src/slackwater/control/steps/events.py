"""What can happen to the trainers' devices and to steps. Plain data, so that a record of it can be replayed."""

from dataclasses import dataclass

from slackwater.control.timer import TimerFired
from slackwater.model.ids import InstanceId, JobId, WorkerId
from slackwater.model.instance import InstanceSpec


@dataclass(frozen=True, slots=True)
class LocalEngineUp:
    """An engine on the trainers' devices is up, and rests until it is started."""

    now_s: float
    spec: InstanceSpec


@dataclass(frozen=True, slots=True)
class LocalEngineDown:
    """Its process is gone."""

    now_s: float
    instance: InstanceId


@dataclass(frozen=True, slots=True)
class EngineRested:
    """From the rollout manager: it let a local engine go."""

    now_s: float
    instance: InstanceId


@dataclass(frozen=True, slots=True)
class StepExpected:
    """Whoever drives the job says how many turns its next step will have."""

    now_s: float
    job: JobId
    turns: int


@dataclass(frozen=True, slots=True)
class LiveTurnsChanged:
    """From the rollout manager: one more turn of the job lives, or (`opened` false) one has ended with so many tokens."""

    now_s: float
    job: JobId
    base_model: str
    opened: bool
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class DevicesWanted:
    """The trainer has work: `DevicesAsked` or `DevicesUnwanted` follows. Until then no local engine starts.

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
class TrainerGone:
    """The trainer's process is gone, whatever it held or wanted."""

    now_s: float
    trainer: WorkerId


@dataclass(frozen=True, slots=True)
class SeedingChanged:
    """From the rollout manager: seeding for the job ended, or goes on again."""

    now_s: float
    job: JobId
    seeds: bool


@dataclass(frozen=True, slots=True)
class StepsOver:
    """The job is over: no step of it will begin or end."""

    now_s: float
    job: JobId


StepEvent = (
    LocalEngineUp
    | LocalEngineDown
    | EngineRested
    | StepExpected
    | LiveTurnsChanged
    | DevicesWanted
    | DevicesUnwanted
    | DevicesAsked
    | DevicesReturned
    | TrainerGone
    | SeedingChanged
    | StepsOver
    | TimerFired
)

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in StepEvent.__args__}
