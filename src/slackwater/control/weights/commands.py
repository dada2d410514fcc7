"""What the weight director asks for: of instances, of the store, and of the rollout manager."""

from dataclasses import dataclass

from slackwater.model.cargo import Cargo
from slackwater.model.ids import InstanceId, NodeId


@dataclass(frozen=True, slots=True)
class PullWeights:
    """Let the instance get the version; it answers `InstanceReady` or `PullFailed`.

    `way` are the cargoes to take from its node's relay, in order: the first whole, or a delta on what the instance has
    in host memory. Without a way the version comes from the store. With `keep` a copy stays in host memory for later deltas.
    """

    instance: InstanceId
    version: str
    way: tuple[Cargo, ...] = ()
    keep: bool = False


@dataclass(frozen=True, slots=True)
class BringCargo:
    """Let the node's relay take a cargo from another node's; it answers `CargoArrived` or `CargoBroke`."""

    node: NodeId
    version: str
    base: str
    source: NodeId


@dataclass(frozen=True, slots=True)
class DropCargo:
    """Let the node's relay forget a cargo, or give up waiting for it."""

    node: NodeId
    version: str
    base: str


@dataclass(frozen=True, slots=True)
class DropVersion:
    """Let the instance free the version's memory; nothing there uses it."""

    instance: InstanceId
    version: str


@dataclass(frozen=True, slots=True)
class DeleteVersion:
    """The version may go from the store: nothing names it, no turn asks for it, nobody is pulling it."""

    version: str


@dataclass(frozen=True, slots=True)
class OfferVersion:
    """To the rollout manager: turns may run with the version on the instance."""

    instance: InstanceId
    version: str


@dataclass(frozen=True, slots=True)
class RecallVersion:
    """To the rollout manager: start nothing more with the version there, and say `VersionFreed` when nothing runs with it."""

    instance: InstanceId
    version: str


@dataclass(frozen=True, slots=True)
class BlameInstance:
    """To the rollout manager: the instance failed, or said something that is not so."""

    instance: InstanceId
    what: str


WeightCommand = (
    PullWeights
    | BringCargo
    | DropCargo
    | DropVersion
    | DeleteVersion
    | OfferVersion
    | RecallVersion
    | BlameInstance
)
