"""Events of the operations controller."""

from typing import TypeAlias

from slackwater.control.message import TimedMessage
from slackwater.control.operations.facts import DispatchDue
from slackwater.control.timer import TimerFired
from slackwater.model.ids import NOBODY, JobId, ModelId, NodeId, TenantId, WorkerId
from slackwater.model.operation import FaultOwner, Operation, OperationRecord


class ModelAdopted(TimedMessage, frozen=True):
    """A model was restored from the durable log: its operations after the last saved state."""

    model: ModelId
    saved_seq: int | None
    records: tuple[OperationRecord, ...]
    owner: TenantId = NOBODY


class OpSubmitted(TimedMessage, frozen=True):
    """An operation was accepted and is in the durable log."""

    operation: Operation
    owner: TenantId = NOBODY


class OpRejected(TimedMessage, frozen=True):
    """A submission was rejected; it still uses up its number."""

    operation: Operation
    reason: str


class ModelClosed(TimedMessage, frozen=True):
    """The model is closed: no more operations are accepted."""

    model: ModelId
    reason: str


class TrainerJoined(TimedMessage, frozen=True):
    worker: WorkerId
    node: NodeId | None = None


class OpsGated(TimedMessage, frozen=True):
    """The job's operations that need a permit run on trainers of these nodes; None: anywhere."""

    job: JobId
    nodes: tuple[NodeId, ...] | None


class StateMoved(TimedMessage, frozen=True):
    """A `MoveState` ended; without an error the other trainer's node has the state."""

    model: ModelId
    ticket: int
    error: str = ""


class TrainerLost(TimedMessage, frozen=True):
    worker: WorkerId
    reason: str


class TicketDetached(TimedMessage, frozen=True):
    """The trainer has copied what it publishes and is free; another report follows."""

    worker: WorkerId
    ticket: int
    elapsed_s: float = 0.0


class TicketDone(TimedMessage, frozen=True):
    """A trainer executed a ticket. `reached`: it found a state with all operations up to this."""

    worker: WorkerId
    ticket: int
    elapsed_s: float
    reached: int | None = None


class TicketFailed(TimedMessage, frozen=True):
    """A trainer failed; with `state_lost` the model's state there can no longer be trusted."""

    worker: WorkerId
    ticket: int
    error: str
    owner: FaultOwner
    state_lost: bool


TrainerEvent: TypeAlias = (
    TrainerJoined | TrainerLost | OpsGated | DispatchDue | StateMoved | TicketDetached
)
ModelEvent: TypeAlias = ModelAdopted | OpSubmitted | OpRejected | ModelClosed
Event: TypeAlias = ModelEvent | TrainerEvent | TicketDone | TicketFailed | TimerFired
EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in Event.__args__}
