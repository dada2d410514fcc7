"""Events of the lender."""

import msgspec

from slackwater.control.message import TimedMessage
from slackwater.control.timer import TimerFired
from slackwater.model.ids import JobId, NodeId, ServiceName


class ServiceOpened(TimedMessage, frozen=True):
    """A service may lend up to `most_nodes` of its nodes; a later event changes the limit."""

    service: ServiceName
    most_nodes: int


class LendingStopped(TimedMessage, frozen=True):
    """A service reclaims all its nodes and lends none until it is opened again."""

    service: ServiceName
    reason: str


class ServingNodeJoined(TimedMessage, frozen=True):
    """A node of a service came up."""

    node: NodeId
    service: ServiceName


class ServingNodeReported(TimedMessage, frozen=True):
    """Use of a node by its service since the last report: peak KV memory as a share of what a loan
    leaves of it, and the mean share of time; `rollout_share` is the share of time that the borrower
    used.
    """

    node: NodeId
    kv_share: float
    busy_share: float
    meets_slo: bool = msgspec.field(default=True, name="keeps_promise")  # as in older records
    rollout_share: float = 1.0


class ServingNodeLost(TimedMessage, frozen=True):
    """The node is lost, with its loan."""

    node: NodeId


class CapacityWanted(TimedMessage, frozen=True):
    """A job's rollout of a base model would use up to `nodes` borrowed nodes."""

    job: JobId
    nodes: int
    base_model: str = ""


class BorrowerStepBegan(TimedMessage, frozen=True):
    """A job begins its next RL step while it still rolls out."""

    job: JobId


class CapacityReturned(TimedMessage, frozen=True):
    """The job trains or has ended: it needs no borrowed nodes."""

    job: JobId


class NodeCleared(TimedMessage, frozen=True):
    """The rollout has left a node that was reclaimed."""

    node: NodeId


class LoanFailed(TimedMessage, frozen=True):
    """The rollout could not start on the node, or ended there by itself."""

    node: NodeId
    reason: str


ServiceEvent = ServiceOpened | LendingStopped
NodeEvent = ServingNodeJoined | ServingNodeReported | ServingNodeLost | NodeCleared | LoanFailed
BorrowerEvent = CapacityWanted | BorrowerStepBegan | CapacityReturned
LendingEvent = ServiceEvent | NodeEvent | BorrowerEvent | TimerFired

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in LendingEvent.__args__}
