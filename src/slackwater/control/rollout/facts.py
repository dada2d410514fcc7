"""Events of turns and instances for other controllers."""

from slackwater.control.message import TimedMessage
from slackwater.model.ids import InstanceId, JobId


class TurnOpened(TimedMessage, frozen=True):
    """A turn of the job is live; `sequence` is the manager's number of it."""

    job: JobId
    base_model: str
    sequence: int = 0


class TurnClosed(TimedMessage, frozen=True):
    """A turn ended; `device_s` is its share of the engines' time."""

    job: JobId
    base_model: str
    prompt_tokens: int = 0
    tokens: int = 0
    device_s: float = 0.0
    waited_s: float = 0.0
    completed: bool = True
    sequence: int = 0


class InstanceReleased(TimedMessage, frozen=True):
    """The manager released an instance. One that `rests` stays up, without its versions."""

    instance: InstanceId
    rests: bool = False
    reason: str = ""
