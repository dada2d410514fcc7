"""Commands of the co-scheduler."""

from dataclasses import dataclass

from slackwater.control.timer import SetTimer
from slackwater.model.ids import GroupId, JobId, NodeId
from slackwater.model.placement import Phase, Strategy


@dataclass(frozen=True, slots=True)
class RentNodes:
    """Start paying for these nodes."""

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class ReturnNodes:
    """Stop paying for these nodes; nothing runs on them."""

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class StartJob:
    """Load a job's state on its nodes, then request a permit for its next phase under this epoch.
    It resumes after `iterations_done`.
    """

    job: JobId
    epoch: int
    group: GroupId
    rollout_nodes: tuple[NodeId, ...]
    train_nodes: tuple[NodeId, ...]
    iterations_done: int
    strategy: Strategy
    reason: str


@dataclass(frozen=True, slots=True)
class StopJob:
    """End a job's processes where they are; its epoch is over. A job that `moves` is started again;
    any other (its node is lost) must be resumed by its owner, as after a crash.
    """

    job: JobId
    epoch: int
    moves: bool
    reason: str


@dataclass(frozen=True, slots=True)
class HoldJob:
    """The job waits for room; `reason` is for its owner."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class RefuseJob:
    """The job can never run on this fleet; `reason` is for its owner."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class GrantPermit:
    """Let a phase run on these nodes. With `switch` another state is on one of them."""

    permit: int
    job: JobId
    epoch: int
    phase: Phase
    nodes: tuple[NodeId, ...]
    switch: bool


@dataclass(frozen=True, slots=True)
class ShrinkRollout:
    """Move a rollout's last responses to a few devices of its nodes, and free the others."""

    permit: int
    job: JobId


Command = (
    RentNodes
    | ReturnNodes
    | StartJob
    | StopJob
    | HoldJob
    | RefuseJob
    | GrantPermit
    | ShrinkRollout
    | SetTimer
)
