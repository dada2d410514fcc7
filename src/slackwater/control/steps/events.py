"""What can happen to the trainers' devices and to steps. Plain data, so that a record of it can be replayed."""

from dataclasses import dataclass

from slackwater.control.timer import TimerFired
from slackwater.model.ids import InstanceId, WorkerId
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
    """Whoever drives the base model's next step says how many turns it will have."""

    now_s: float
    base_model: str
    turns: int


@dataclass(frozen=True, slots=True)
class LiveTurnsChanged:
    """From the rollout manager: one more turn of the base model lives, or (`opened` false) one has ended with so many tokens."""

    now_s: float
    base_model: str
    opened: bool
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class DevicesWanted:
    """The trainer has work: `DevicesAsked` or `DevicesUnwanted` follows. Until then no local engine starts.

    `base_model` says whose devices; it may be left out where all base models share the same.
    """

    now_s: float
    trainer: WorkerId
    base_model: str | None = None


@dataclass(frozen=True, slots=True)
class DevicesUnwanted:
    """The trainer has no work after all."""

    now_s: float
    trainer: WorkerId


@dataclass(frozen=True, slots=True)
class DevicesAsked:
    """The trainer could begin its work, of this base model, at once."""

    now_s: float
    trainer: WorkerId
    base_model: str | None


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
    """From the rollout manager: seeding of the base model ended, or goes on again."""

    now_s: float
    base_model: str
    seeds: bool


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
    | TimerFired
)

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in StepEvent.__args__}
