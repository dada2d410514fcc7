"""What happened to operations, as other controllers hear it."""

from slackwater.control.message import TimedMessage
from slackwater.model.ids import JobId, ModelId, RequestId
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


class DispatchDue(TimedMessage, frozen=True):
    """After a step of a job that shares nodes the model's next operation waits until the phase
    keeper has said whether the phase goes on: it hears of the step first, and its answer is in the
    inbox before this comes back for the second time (`settled`).
    """

    model: ModelId
    settled: bool = False
