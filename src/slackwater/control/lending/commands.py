"""What the lender asks its body to do."""

from dataclasses import dataclass

from slackwater.control.timer import SetTimer
from slackwater.model.ids import JobId, NodeId


@dataclass(frozen=True, slots=True)
class LendNode:
    """Bring the job's rollout model onto the node, and let it join the job's fleet as a borrowed instance."""

    node: NodeId
    job: JobId


@dataclass(frozen=True, slots=True)
class TakeBack:
    """The service needs the node: the rollout leaves at once, its turns move; answer `NodeCleared`."""

    node: NodeId
    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class BeginStep:
    """The job's next RL step begins: the node sets the rollout's KV budget anew."""

    node: NodeId
    job: JobId


LendingCommand = LendNode | TakeBack | BeginStep | SetTimer
