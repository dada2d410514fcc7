"""What can happen to the lender. Plain data, so that a record of it can be replayed."""

from dataclasses import dataclass

from slackwater.control.timer import TimerFired
from slackwater.model.ids import JobId, NodeId, ServiceName


@dataclass(frozen=True, slots=True)
class ServiceOpened:
    """A service may lend up to `most_nodes` of its nodes; said again, the limit changes."""

    now_s: float
    service: ServiceName
    most_nodes: int


@dataclass(frozen=True, slots=True)
class LendingStopped:
    """A service takes everything back and lends nothing until it is opened again."""

    now_s: float
    service: ServiceName
    reason: str


@dataclass(frozen=True, slots=True)
class ServingNodeJoined:
    """A node of a service is up."""

    now_s: float
    node: NodeId
    service: ServiceName


@dataclass(frozen=True, slots=True)
class ServingNodeReported:
    """What its service used of a node's KV memory and time since the last report, at most and on
    average; and whether it keeps its promise lately.
    """

    now_s: float
    node: NodeId
    kv_share: float
    busy_share: float
    keeps_promise: bool = True


@dataclass(frozen=True, slots=True)
class ServingNodeLost:
    """The node is gone, with what it had borrowed out."""

    now_s: float
    node: NodeId


@dataclass(frozen=True, slots=True)
class CapacityWanted:
    """A job's rollout of a base model would use up to `nodes` borrowed nodes.

    Said again, the number changes.
    """

    now_s: float
    job: JobId
    nodes: int
    base_model: str = ""


@dataclass(frozen=True, slots=True)
class BorrowerStepBegan:
    """A job that rolls out already begins its next RL step, as one that trains meanwhile does."""

    now_s: float
    job: JobId


@dataclass(frozen=True, slots=True)
class CapacityReturned:
    """The job trains, or has ended: it needs no borrowed nodes."""

    now_s: float
    job: JobId


@dataclass(frozen=True, slots=True)
class NodeCleared:
    """Nothing of the rollout is left on a node that was taken back."""

    now_s: float
    node: NodeId


@dataclass(frozen=True, slots=True)
class LoanFailed:
    """The rollout could not come up on the node, or left it by itself; nothing of it is left."""

    now_s: float
    node: NodeId
    reason: str


LendingEvent = (
    ServiceOpened
    | LendingStopped
    | ServingNodeJoined
    | ServingNodeReported
    | ServingNodeLost
    | CapacityWanted
    | BorrowerStepBegan
    | CapacityReturned
    | NodeCleared
    | LoanFailed
    | TimerFired
)

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in LendingEvent.__args__}
