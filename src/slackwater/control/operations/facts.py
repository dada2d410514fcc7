"""What happened to operations, as other controllers hear it."""

from dataclasses import dataclass

from slackwater.model.ids import JobId, RequestId
from slackwater.model.operation import OpKind


@dataclass(frozen=True, slots=True)
class OpOver:
    """An operation of the job ended, well if `done`."""

    now_s: float
    job: JobId
    request: RequestId
    kind: OpKind
    done: bool


@dataclass(frozen=True, slots=True)
class PublishDetached:
    """A publish of the job has its copy: the trainer is free, and the rest is written beside."""

    now_s: float
    job: JobId
    request: RequestId
