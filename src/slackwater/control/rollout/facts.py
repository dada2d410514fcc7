"""What happened to turns and instances, as other controllers hear it."""

from dataclasses import dataclass

from slackwater.model.ids import InstanceId, JobId


@dataclass(frozen=True, slots=True)
class TurnOpened:
    """One more turn of the job is live, the manager's number `sequence`."""

    now_s: float
    job: JobId
    base_model: str
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class TurnClosed:
    """A turn ended, well or not; `device_s` is its share of the engines' time."""

    now_s: float
    job: JobId
    base_model: str
    prompt_tokens: int = 0
    tokens: int = 0
    device_s: float = 0.0
    waited_s: float = 0.0
    completed: bool = True
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class InstanceReleased:
    """The manager let an instance go; one that `rests` lives on, and must forget what it held."""

    now_s: float
    instance: InstanceId
    rests: bool = False
