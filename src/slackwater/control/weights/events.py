"""What can happen to weight versions. Plain data, so that a record of it can be replayed."""

from dataclasses import dataclass

from slackwater.control.rollout.events import InstanceJoined, InstanceLost
from slackwater.control.rollout.facts import InstanceReleased
from slackwater.model.ids import InstanceId, JobId, NodeId


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    """A version can be pulled from now on. It belongs to `job`; without one it is a base model's
    own, for everybody.

    `line` names the model in training whose versions follow each other: a newer one supersedes the
    older ones. `sampled` says that turns are about to ask for it: who holds the line's last version
    pulls this one at once.
    """

    now_s: float
    job: JobId | None
    version: str
    base_model: str = ""
    line: str = ""
    adapter: bool = False
    sampled: bool = True


@dataclass(frozen=True, slots=True)
class WeightsRetired:
    """Nothing names the version any more: it may go once no turn asks for it."""

    now_s: float
    version: str


@dataclass(frozen=True, slots=True)
class VersionNeeded:
    """So many live turns ask for the version; `waiting` if one of them finds no instance that could
    take it.
    """

    now_s: float
    job: JobId
    base_model: str
    version: str
    turns: int
    waiting: bool = False


@dataclass(frozen=True, slots=True)
class InstanceReady:
    """The instance says that it now holds `version`; `kept` if a copy of it lies in host memory,
    for deltas to build on.
    """

    now_s: float
    instance: InstanceId
    version: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class RelayJoined:
    """A node can relay weights; it has none of ours yet. `site` is the fast network that it
    is on.
    """

    now_s: float
    node: NodeId
    site: str = ""


@dataclass(frozen=True, slots=True)
class RelayLeft:
    """The node's relay is gone, with what it held."""

    now_s: float
    node: NodeId


@dataclass(frozen=True, slots=True)
class PayloadsStocked:
    """A publisher put a version on its node's relay: the bytes of each payload, by base (empty: the
    whole).
    """

    now_s: float
    node: NodeId
    version: str
    sizes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class PayloadArrived:
    """The node's relay has all of a payload."""

    now_s: float
    node: NodeId
    version: str
    base: str


@dataclass(frozen=True, slots=True)
class PayloadFailed:
    """The node's relay could not get a payload from `source`; what has come stays."""

    now_s: float
    node: NodeId
    version: str
    base: str
    source: NodeId
    error: str


@dataclass(frozen=True, slots=True)
class PullFailed:
    """The instance could not get `version`."""

    now_s: float
    instance: InstanceId
    version: str
    error: str


@dataclass(frozen=True, slots=True)
class VersionFreed:
    """Nothing runs with a version that was recalled from the instance."""

    now_s: float
    instance: InstanceId
    version: str


WeightEvent = (
    WeightsPublished
    | WeightsRetired
    | VersionNeeded
    | InstanceJoined
    | InstanceLost
    | InstanceReleased
    | InstanceReady
    | PullFailed
    | VersionFreed
    | RelayJoined
    | RelayLeft
    | PayloadsStocked
    | PayloadArrived
    | PayloadFailed
)

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in WeightEvent.__args__}
