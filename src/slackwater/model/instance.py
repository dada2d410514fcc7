"""Instances: one rollout engine process each, of any kind."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from slackwater.model.errors import check_above_zero
from slackwater.model.ids import InstanceId, JobId, NodeId


class InstanceKind(StrEnum):
    """Where the engine runs, which decides how it may leave."""

    LOCAL = "local"  # a training node while it seeds
    DEDICATED = "dedicated"
    SPOT = "spot"  # may vanish at any moment
    BORROWED = "borrowed"  # on a serving node: its budget may be cut


class InstanceState(StrEnum):
    """Joining -> pulling -> ready -> draining -> gone; a ready one may pull another version."""

    JOINING = "joining"
    PULLING = "pulling"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


EngineName = Literal["embedded", "vllm", "sglang"]
OWN_KINDS = (InstanceKind.LOCAL, InstanceKind.DEDICATED)


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What an instance declares when it joins.

    `max_running` is the concurrency cap (profiled for own engines, the SLO-safe room for borrowed
    ones). `base_model` is the only one that it can serve, or empty. `job` is set when it is lent to
    one job only. `max_versions` counts whole sets of weights, `max_adapters` adapters
    (0: they count as whole sets). Without `exact_continuation` (an engine that cannot go on at a
    position of a random stream) a moved turn still keeps its tokens, but the rest may differ.
    `node` is where it runs, if that is known, `place` what the co-scheduler calls that node. An
    instance that `sleeps` has left its devices once it sends `EngineRested`.
    """

    instance: InstanceId
    kind: InstanceKind
    max_running: int
    max_context_tokens: int
    kv_tokens: int
    max_versions: int = 4
    exact_continuation: bool = True
    job: JobId | None = None
    base_model: str = ""
    max_adapters: int = 0
    node: NodeId | None = None
    place: NodeId | None = None
    sleeps: bool = False

    def __post_init__(self) -> None:
        counts = ("max_running", "max_context_tokens", "kv_tokens", "max_versions")
        check_above_zero(f"instance {self.instance}: ", self, *counts)

    def runs(self, base_model: str) -> bool:
        return not self.base_model or self.base_model == base_model

    def serves(self, job: JobId, base_model: str) -> bool:
        """Whether it can run the base model, and is not lent to another job."""
        return self.job in (None, job) and self.runs(base_model)

    def serves_any(self, job: JobId, base_models: Iterable[str]) -> bool:
        return any(self.serves(job, base_model) for base_model in base_models)
