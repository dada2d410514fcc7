"""Commands of the weight director, and its messages to the rollout manager."""

from slackwater.control.message import Message
from slackwater.control.rollout.events import InstanceFaulted, VersionOffered, VersionRecalled
from slackwater.model.ids import InstanceId, NodeId
from slackwater.model.payload import Payload


class PullVersion(Message, frozen=True):
    """Pull the version; answered by `InstanceReady` or `PullFailed`.

    `way` are payloads of its node's relay, in order: one whole, or deltas on a copy in host memory.
    Without it the version comes from the store. With `keep` a copy stays in host memory.
    """

    instance: InstanceId
    version: str
    way: tuple[Payload, ...] = ()
    keep: bool = False


class FetchPayload(Message, frozen=True):
    """Fetch a payload into the node's relay; answered by `PayloadArrived` or `PayloadFailed`."""

    node: NodeId
    version: str
    base: str
    source: NodeId


class DropPayload(Message, frozen=True):
    """Drop a payload from the node's relay, or stop waiting for it."""

    node: NodeId
    version: str
    base: str


class DropVersion(Message, frozen=True):
    """Free the version's memory on the instance; nothing there uses it."""

    instance: InstanceId
    version: str


class DeleteVersion(Message, frozen=True):
    """Delete the version from the store: nothing names, needs or pulls it."""

    version: str


RelayCommand = FetchPayload | DropPayload
HolderReport = VersionOffered | VersionRecalled | InstanceFaulted
WeightCommand = PullVersion | RelayCommand | DropVersion | DeleteVersion | HolderReport
