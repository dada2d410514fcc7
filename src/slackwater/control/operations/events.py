"""What can happen to operations."""

from dataclasses import dataclass
from typing import TypeAlias

from slackwater.control.timer import TimerFired
from slackwater.model.ids import NOBODY, JobId, ModelId, NodeId, TenantId, WorkerId
from slackwater.model.operation import FaultOwner, Operation, OperationRecord


@dataclass(frozen=True, slots=True)
class ModelAdopted:
    """A model from the durable log: its operations after the last saved state, by seq."""

    now_s: float
    model: ModelId
    saved_seq: int | None
    records: tuple[OperationRecord, ...]
    owner: TenantId = NOBODY


@dataclass(frozen=True, slots=True)
class OpSubmitted:
    """An operation was accepted and is in the durable log."""

    now_s: float
    operation: Operation
    owner: TenantId = NOBODY


@dataclass(frozen=True, slots=True)
class OpRejected:
    """A submission was refused at the door; it still uses up its number."""

    now_s: float
    operation: Operation
    reason: str


@dataclass(frozen=True, slots=True)
class ModelClosed:
    """Nothing more will come for a model."""

    now_s: float
    model: ModelId
    reason: str


@dataclass(frozen=True, slots=True)
class TrainerJoined:
    now_s: float
    worker: WorkerId
    node: NodeId | None = None


@dataclass(frozen=True, slots=True)
class OpsGated:
    """Operations of the job that need a train permit run on trainers of these nodes; None: on
    any.
    """

    now_s: float
    job: JobId
    nodes: tuple[NodeId, ...] | None


@dataclass(frozen=True, slots=True)
class StateMoved:
    """What became of a `MoveState`; without an error the state is in the memory of the other
    trainer's node.
    """

    now_s: float
    model: ModelId
    ticket: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class TrainerLost:
    now_s: float
    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class TicketDetached:
    """The trainer has its copy of what it publishes, and is free.

    `TicketDone` or `TicketFailed` says how the writing ended.
    """

    now_s: float
    worker: WorkerId
    ticket: int
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TicketDone:
    """A trainer did what a ticket told it. `reached`: it found a state that has the effects of all
    operations up to that one.
    """

    now_s: float
    worker: WorkerId
    ticket: int
    elapsed_s: float
    reached: int | None = None


@dataclass(frozen=True, slots=True)
class TicketFailed:
    """A trainer could not; `state_lost` says that the model's state there can no longer be
    trusted.
    """

    now_s: float
    worker: WorkerId
    ticket: int
    error: str
    owner: FaultOwner
    state_lost: bool


Event: TypeAlias = (
    ModelAdopted
    | OpSubmitted
    | OpRejected
    | ModelClosed
    | TrainerJoined
    | OpsGated
    | StateMoved
    | TrainerLost
    | TicketDetached
    | TicketDone
    | TicketFailed
    | TimerFired
)
EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in Event.__args__}
