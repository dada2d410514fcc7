"""Events of operations for other controllers."""

from slackwater.control.message import TimedMessage
from slackwater.model.ids import JobId, ModelId, RequestId
from slackwater.model.operation import OpKind


class OpEnded(TimedMessage, frozen=True):
    """An operation of the job ended; `done` if it succeeded."""

    job: JobId
    request: RequestId
    kind: OpKind
    done: bool


class PublishDetached(TimedMessage, frozen=True):
    """A publish of the job has its copy: the trainer is free while the copy is written."""

    job: JobId
    request: RequestId


class DispatchDue(TimedMessage, frozen=True):
    """The model's next operation may be dispatched after an optim_step of a job that shares nodes.

    The controller sends this to itself twice. Between the two the phase keeper handles the end of
    the step, so that a gate that it closes is in effect before the second (`settled`) dispatches.
    """

    model: ModelId
    settled: bool = False
