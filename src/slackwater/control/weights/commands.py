"""What the weight director asks instances and the store for, and tells the rollout manager."""

from slackwater.control.message import Message
from slackwater.control.rollout.events import InstanceFaulted, VersionOffered, VersionRecalled
from slackwater.model.ids import InstanceId, NodeId
from slackwater.model.payload import Payload


class PullWeights(Message, frozen=True):
    """Let the instance get the version; it answers `InstanceReady` or `PullFailed`.

    `way` are the payloads to take from its node's relay, in order: the first whole, or a delta on
    what the instance has in host memory. Without a way the version comes from the store. With
    `keep` a copy stays in host memory for later deltas.
    """

    instance: InstanceId
    version: str
    way: tuple[Payload, ...] = ()
    keep: bool = False


class FetchPayload(Message, frozen=True):
    """Let the node's relay take a payload from another node's; it answers `PayloadArrived` or
    `PayloadBroke`.
    """

    node: NodeId
    version: str
    base: str
    source: NodeId


class DropPayload(Message, frozen=True):
    """Let the node's relay forget a payload, or give up waiting for it."""

    node: NodeId
    version: str
    base: str


class DropVersion(Message, frozen=True):
    """Let the instance free the version's memory; nothing there uses it."""

    instance: InstanceId
    version: str


class DeleteVersion(Message, frozen=True):
    """The version may go from the store: nothing names it, no turn asks for it, nobody is pulling
    it.
    """

    version: str


WeightCommand = (
    PullWeights
    | FetchPayload
    | DropPayload
    | DropVersion
    | DeleteVersion
    | VersionOffered
    | VersionRecalled
    | InstanceFaulted
)
