"""Commands of the operations controller. A ticket numbers one order to one trainer."""

from typing import TypeAlias

from slackwater.control.message import Message, TimedMessage
from slackwater.control.operations.facts import DispatchDue, OpEnded, PublishDetached
from slackwater.control.timer import SetTimer
from slackwater.model.ids import JobId, ModelId, RequestId, WorkerId
from slackwater.model.operation import FaultOwner, Operation


class RunOp(Message, frozen=True):
    """Run an operation; with `replay` only for its effect. `at_most`: see `RestoreState`."""

    worker: WorkerId
    ticket: int
    operation: Operation
    replay: bool
    at_most: int = -1


class RestoreModel(Message, frozen=True):
    """Load the state that was saved after `seq`, or a later one that the node kept from a dead
    trainer, with the effects of no operation after `at_most`.
    """

    worker: WorkerId
    ticket: int
    model: ModelId
    seq: int
    at_most: int = -1


class DiscardGradients(Message, frozen=True):
    """Clear the accumulated gradients, in place of the failed optim_step `seq`."""

    worker: WorkerId
    ticket: int
    model: ModelId
    seq: int


class SaveState(Message, frozen=True):
    """Save the complete state after `seq`."""

    worker: WorkerId
    ticket: int
    model: ModelId
    seq: int


TrainerOrder: TypeAlias = RunOp | RestoreModel | DiscardGradients | SaveState


class StartWork(TimedMessage, frozen=True):
    """For device ownership: send the order to the trainer once it has its devices."""

    worker: WorkerId
    job: JobId | None
    order: TrainerOrder


class CommitSnapshot(Message, frozen=True):
    """The state after `seq` is saved: the log up to `seq` is no longer needed."""

    model: ModelId
    seq: int


class DropModel(Message, frozen=True):
    """Drop a model's state on a trainer; there is no answer."""

    worker: WorkerId
    model: ModelId


class MoveState(Message, frozen=True):
    """Send a model's state to the memory of the node of `to`; answered by `StateMoved`."""

    worker: WorkerId
    ticket: int
    model: ModelId
    to: WorkerId


class ForgetStrays(Message, frozen=True):
    """Drop the model's states that no trainer holds, on every node; there is no answer."""

    model: ModelId


class CompleteOp(Message, frozen=True):
    """The result of `ticket` is this request's: log it durably, then notify its owner."""

    request: RequestId
    ticket: int


class FailOp(Message, frozen=True):
    """The request failed: log it durably, then notify its owner."""

    request: RequestId
    error: str
    owner: FaultOwner


StateCommand: TypeAlias = CommitSnapshot | DropModel | MoveState | ForgetStrays
Command: TypeAlias = (
    StartWork
    | StateCommand
    | CompleteOp
    | FailOp
    | OpEnded
    | PublishDetached
    | DispatchDue
    | SetTimer
)
