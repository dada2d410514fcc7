"""Commands of the lender."""

from slackwater.control.message import Message
from slackwater.control.timer import SetTimer
from slackwater.model.ids import JobId, NodeId


class LendNode(Message, frozen=True):
    """Load the base model of the job's rollouts on the node, as a borrowed instance."""

    node: NodeId
    job: JobId
    base_model: str = ""


class ReclaimNode(Message, frozen=True):
    """The service needs the node: the rollout leaves at once; answered by `NodeCleared`."""

    node: NodeId
    job: JobId
    reason: str


class BeginStep(Message, frozen=True):
    """The job's next RL step begins: the node resets the rollout's KV budget."""

    node: NodeId
    job: JobId


LendingCommand = LendNode | ReclaimNode | BeginStep | SetTimer
