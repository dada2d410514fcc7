"""What happened to turns and instances, as other controllers hear it."""

from slackwater.control.message import TimedMessage
from slackwater.model.ids import InstanceId, JobId


class TurnOpened(TimedMessage, frozen=True):
    """One more turn of the job is live, the manager's number `sequence`."""

    job: JobId
    base_model: str
    sequence: int = 0


class TurnClosed(TimedMessage, frozen=True):
    """A turn ended, well or not; `device_s` is its share of the engines' time."""

    job: JobId
    base_model: str
    prompt_tokens: int = 0
    tokens: int = 0
    device_s: float = 0.0
    waited_s: float = 0.0
    completed: bool = True
    sequence: int = 0


class InstanceReleased(TimedMessage, frozen=True):
    """The manager let an instance go; one that `rests` lives on, and must forget what it held."""

    instance: InstanceId
    rests: bool = False
    reason: str = ""
