"""What happened to operations, as other controllers hear it."""

from slackwater.control.message import TimedMessage
from slackwater.model.ids import JobId, RequestId
from slackwater.model.operation import OpKind


class OpOver(TimedMessage, frozen=True):
    """An operation of the job ended, well if `done`."""

    job: JobId
    request: RequestId
    kind: OpKind
    done: bool


class PublishDetached(TimedMessage, frozen=True):
    """A publish of the job has its copy: the trainer is free, and the rest is written beside."""

    job: JobId
    request: RequestId
