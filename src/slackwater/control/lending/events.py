"""What can happen to the lender. Plain data, so that a record of it can be replayed."""

from slackwater.control.message import TimedMessage
from slackwater.control.timer import TimerFired
from slackwater.model.ids import JobId, NodeId, ServiceName


class ServiceOpened(TimedMessage, frozen=True):
    """A service may lend up to `most_nodes` of its nodes; said again, the limit changes."""

    service: ServiceName
    most_nodes: int


class LendingStopped(TimedMessage, frozen=True):
    """A service takes everything back and lends nothing until it is opened again."""

    service: ServiceName
    reason: str


class ServingNodeJoined(TimedMessage, frozen=True):
    """A node of a service is up."""

    node: NodeId
    service: ServiceName


class ServingNodeReported(TimedMessage, frozen=True):
    """What its service used of a node since the last report: KV memory at most, as a share of what
    a loan leaves of it, and time on average; `rollout_share` is the time that its borrower used.
    """

    node: NodeId
    kv_share: float
    busy_share: float
    keeps_promise: bool = True
    rollout_share: float = 1.0


class ServingNodeLost(TimedMessage, frozen=True):
    """The node is gone, with what it had borrowed out."""

    node: NodeId


class CapacityWanted(TimedMessage, frozen=True):
    """A job's rollout of a base model would use up to `nodes` borrowed nodes; replaces the last."""

    job: JobId
    nodes: int
    base_model: str = ""


class BorrowerStepBegan(TimedMessage, frozen=True):
    """A job that rolls out already begins its next RL step, as one that trains meanwhile does."""

    job: JobId


class CapacityReturned(TimedMessage, frozen=True):
    """The job trains, or has ended: it needs no borrowed nodes."""

    job: JobId


class NodeCleared(TimedMessage, frozen=True):
    """Nothing of the rollout is left on a node that was taken back."""

    node: NodeId


class LoanFailed(TimedMessage, frozen=True):
    """The rollout could not come up on the node, or left it by itself; nothing of it is left."""

    node: NodeId
    reason: str


ServiceEvent = ServiceOpened | LendingStopped
NodeEvent = ServingNodeJoined | ServingNodeReported | ServingNodeLost | NodeCleared | LoanFailed
BorrowerEvent = CapacityWanted | BorrowerStepBegan | CapacityReturned
LendingEvent = ServiceEvent | NodeEvent | BorrowerEvent | TimerFired

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in LendingEvent.__args__}
