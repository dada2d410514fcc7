"""What operations ask for. A ticket names one thing that one trainer does."""

from typing import TypeAlias

from slackwater.control.message import Message, TimedMessage
from slackwater.control.operations.facts import DispatchDue, OpOver, PublishDetached
from slackwater.control.timer import SetTimer
from slackwater.model.ids import JobId, ModelId, RequestId, WorkerId
from slackwater.model.operation import FaultOwner, Operation


class RunOp(Message, frozen=True):
    """Run an operation; with `replay` only its effect is wanted. `at_most`: see `RestoreState`."""

    worker: WorkerId
    ticket: int
    operation: Operation
    replay: bool
    at_most: int = -1


class RestoreState(Message, frozen=True):
    """Load the state that was saved after `seq`, or a later one that the node kept from a dead
    trainer, with the effects of operations up to `at_most`.
    """

    worker: WorkerId
    ticket: int
    model: ModelId
    seq: int
    at_most: int = -1


class DropGradients(Message, frozen=True):
    """Clear what was accumulated: the slate is clean after the failed optim_step `seq`."""

    worker: WorkerId
    ticket: int
    model: ModelId
    seq: int


class TakeSnapshot(Message, frozen=True):
    """Save the complete state as it is after `seq`."""

    worker: WorkerId
    ticket: int
    model: ModelId
    seq: int


TrainerOrder: TypeAlias = RunOp | RestoreState | DropGradients | TakeSnapshot


class StartWork(TimedMessage, frozen=True):
    """To device ownership: the order leaves for the trainer once it has its devices."""

    worker: WorkerId
    job: JobId | None
    order: TrainerOrder


class CommitSnapshot(Message, frozen=True):
    """The state after `seq` is on disk: the log up to it is no longer needed."""

    model: ModelId
    seq: int


class ForgetModel(Message, frozen=True):
    """Let a trainer drop a model's state; nothing is reported back."""

    worker: WorkerId
    model: ModelId


class MoveState(Message, frozen=True):
    """Send a model's state to the memory of the node of `to`; answered by `StateMoved`."""

    worker: WorkerId
    ticket: int
    model: ModelId
    to: WorkerId


class ForgetStrays(Message, frozen=True):
    """Drop the model's states that no trainer holds, on every node; not answered."""

    model: ModelId


class CompleteOp(Message, frozen=True):
    """The result that came with `ticket` is this request's: make it durable, then tell."""

    request: RequestId
    ticket: int


class FailOp(Message, frozen=True):
    """The request has failed: make it durable, then tell."""

    request: RequestId
    error: str
    owner: FaultOwner


StateCommand: TypeAlias = CommitSnapshot | ForgetModel | MoveState | ForgetStrays
Command: TypeAlias = (
    StartWork
    | StateCommand
    | CompleteOp
    | FailOp
    | OpOver
    | PublishDetached
    | DispatchDue
    | SetTimer
)
