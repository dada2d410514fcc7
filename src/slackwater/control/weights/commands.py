"""What the weight director asks for: of instances, of the store, and of the rollout manager."""

from dataclasses import dataclass

from slackwater.model.ids import InstanceId


@dataclass(frozen=True, slots=True)
class PullWeights:
    """Let the instance get the version; it answers `InstanceReady` or `PullFailed`."""

    instance: InstanceId
    version: str


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
    PullWeights | DropVersion | DeleteVersion | OfferVersion | RecallVersion | BlameInstance
)
