"""Commands of the co-scheduler, and of the phase controller beside them."""

from slackwater.control.message import Message
from slackwater.control.operations.events import OpsGated
from slackwater.control.timer import SetTimer
from slackwater.model.ids import GroupId, JobId, NodeId
from slackwater.model.placement import Phase, Strategy


class RentNodes(Message, frozen=True):
    """Start paying for these nodes."""

    nodes: tuple[NodeId, ...]


class ReturnNodes(Message, frozen=True):
    """Stop paying for these nodes; nothing runs on them."""

    nodes: tuple[NodeId, ...]


class StartJob(Message, frozen=True):
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


class StopJob(Message, frozen=True):
    """End a job's processes where they are; its epoch is over. A job that `moves` is started again;
    any other (its node is lost) must be resumed by its owner, as after a crash.
    """

    job: JobId
    epoch: int
    moves: bool
    reason: str


class HoldJob(Message, frozen=True):
    """The job waits for room; `reason` is for its owner."""

    job: JobId
    reason: str


class RefuseJob(Message, frozen=True):
    """The job can never run on this fleet; `reason` is for its owner."""

    job: JobId
    reason: str


class GrantPermit(Message, frozen=True):
    """Let a phase run on these nodes. With `switch` another state is on one of them."""

    permit: int
    job: JobId
    epoch: int
    phase: Phase
    nodes: tuple[NodeId, ...]
    switch: bool


class ShrinkRollout(Message, frozen=True):
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


class PermitGiven(Message, frozen=True):
    """A phase begins. With `asked` the job's own code waits for the permit."""

    job: JobId
    permit: int
    phase: Phase
    iteration: int
    nodes: tuple[NodeId, ...]
    switch: bool
    asked: bool


class PermitEnded(Message, frozen=True):
    """A phase is over. `lost` says why, if it did not end by itself; the job is told."""

    job: JobId
    permit: int
    lost: str = ""


class PermitShrunk(Message, frozen=True):
    """The rollout's last turns continue on a few instances; the rest of its nodes go to the next
    job.
    """

    job: JobId
    permit: int


PhaseCommand = OpsGated | PermitGiven | PermitEnded | PermitShrunk
