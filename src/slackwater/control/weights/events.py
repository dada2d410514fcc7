"""Events of the weight director."""

from slackwater.control.message import TimedMessage
from slackwater.control.rollout.events import InstanceJoined, InstanceLost, JobGated
from slackwater.control.rollout.facts import InstanceReleased
from slackwater.model.ids import InstanceId, JobId, NodeId


class WeightsPublished(TimedMessage, frozen=True):
    """A version can be pulled. It belongs to `job`; without one it is a base model's own.

    `line` names the model whose newer versions supersede older ones. `sampled`: turns are about to
    ask for it, so the holders of the last version pull it at once.
    """

    job: JobId | None
    version: str
    base_model: str = ""
    line: str = ""
    adapter: bool = False
    sampled: bool = True


class WeightsRetired(TimedMessage, frozen=True):
    """Nothing refers to the version any more: it is deleted once no turn needs it."""

    version: str


class VersionNeeded(TimedMessage, frozen=True):
    """So many live turns need the version; `waiting` if no instance could take one of them."""

    job: JobId
    base_model: str
    version: str
    turns: int
    waiting: bool = False


class InstanceReady(TimedMessage, frozen=True):
    """The instance holds `version`; with `kept`, a copy stays in host memory for deltas."""

    instance: InstanceId
    version: str
    kept: bool = False


class RelayJoined(TimedMessage, frozen=True):
    """A node can relay weights and holds none yet. `site` is the fast network that it is on."""

    node: NodeId
    site: str = ""


class RelayLeft(TimedMessage, frozen=True):
    """The node's relay is gone, with what it held."""

    node: NodeId


class PayloadsStocked(TimedMessage, frozen=True):
    """A publisher stocked its node's relay: bytes of each payload, by base (empty: the whole)."""

    node: NodeId
    version: str
    sizes: tuple[tuple[str, int], ...]


class PayloadArrived(TimedMessage, frozen=True):
    """The node's relay has all of a payload."""

    node: NodeId
    version: str
    base: str


class PayloadFailed(TimedMessage, frozen=True):
    """The node's relay could not get a payload from `source`; what has come stays."""

    node: NodeId
    version: str
    base: str
    source: NodeId
    error: str


class PullFailed(TimedMessage, frozen=True):
    """The instance could not get `version`."""

    instance: InstanceId
    version: str
    error: str


class VersionFreed(TimedMessage, frozen=True):
    """Nothing runs with a version that was recalled from the instance."""

    instance: InstanceId
    version: str


RelayEvent = RelayJoined | RelayLeft | PayloadsStocked | PayloadArrived | PayloadFailed
HolderEvent = InstanceJoined | InstanceLost | InstanceReleased | InstanceReady | PullFailed
VersionEvent = WeightsPublished | WeightsRetired | VersionNeeded | VersionFreed | JobGated
WeightEvent = VersionEvent | HolderEvent | RelayEvent
