"""Operations: the model executions that clients request, numbered in order."""

from dataclasses import dataclass
from enum import StrEnum

from slackwater.model.ids import JobId, ModelId, RequestId

NO_JOB = JobId("")


class OpKind(StrEnum):
    """What an operation does to a model's trainable state."""

    CREATE = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE = "save_weights"
    LOAD = "load_weights"
    PUBLISH = "save_weights_for_sampler"

    @property
    def needs_permit(self) -> bool:
        """Whether it belongs to a train phase."""
        return self in (OpKind.FORWARD, OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP)

    @property
    def changes_state(self) -> bool:
        """Whether the recovery of a model must replay it."""
        return self in (OpKind.CREATE, OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP, OpKind.LOAD)


class OpStatus(StrEnum):
    """WAITING covers queued and running: the result is not durable yet."""

    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"


class FaultOwner(StrEnum):
    """Who can fix a failure: the caller, or the operator of the service."""

    USER = "user"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class Operation:
    """One accepted operation; `seq` orders it within its model (0 creates the model)."""

    request: RequestId
    model: ModelId
    seq: int
    kind: OpKind
    job: JobId = NO_JOB


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """An operation in the durable log."""

    operation: Operation
    status: OpStatus
