"""Records of the weight director: versions, and the instances that hold them."""

from dataclasses import dataclass, field

from slackwater.model.ids import InstanceId, JobId
from slackwater.model.instance import InstanceSpec

COPIES_KEPT = 2  # whole versions that an instance keeps in host memory, for deltas to build on


@dataclass(slots=True)
class VersionRecord:
    """One version. `number` is the order of publishing; `turns` how many live turns ask for it."""

    version: str
    job: JobId | None
    base_model: str
    line: str
    adapter: bool
    number: int
    turns: int = 0
    needed_at: int = 0
    retired: bool = False
    superseded: bool = False
    evicted_at: int = 0  # when an instance last gave it up to make room; 0: never

    @property
    def of_line(self) -> tuple[JobId | None, str, str]:
        """Versions of one model have the same."""
        return (self.job, self.base_model, self.line)


@dataclass(slots=True)
class VersionHolder:
    """One instance. Turns may start on `offered`, and finish on `recalled` versions."""

    spec: InstanceSpec
    offered: dict[str, None] = field(default_factory=dict)
    recalled: set[str] = field(default_factory=set)
    pulling: set[str] = field(default_factory=set)
    pulled_before: set[str] = field(default_factory=set)
    copies: list[str] = field(default_factory=list)  # in host memory, the newest last
    coming: dict[str, str] = field(default_factory=dict)  # pulled to be kept -> the copy it changes

    def copies_then(self) -> list[str]:
        """The copies in host memory once everything that is on its way has come."""
        then = list(self.copies)
        for version, changed in self.coming.items():
            then = with_copy(then, version, changed)
        return then

    @property
    def instance(self) -> InstanceId:
        return self.spec.instance

    def has(self, version: str) -> bool:
        """Turns may run with it there, now or soon."""
        return version in self.offered or version in self.pulling

    def may_hold(self, record: VersionRecord) -> bool:
        """Of its base model, and not of a job that it is not lent to."""
        spec = self.spec
        return spec.runs(record.base_model) and (spec.job is None or record.job in (None, spec.job))

    def all(self) -> set[str]:
        """Whatever takes its memory."""
        return {*self.offered, *self.recalled, *self.pulling}


def with_copy(copies: list[str], version: str, changed: str) -> list[str]:
    """The copies after one more, which replaces its base or the oldest."""
    left = [copy for copy in copies if copy not in (changed, version)]
    return [*left, version][-COPIES_KEPT:]


def limit_of(spec: InstanceSpec, adapter: bool) -> int:
    """How many versions of a kind the instance is to hold."""
    return spec.max_adapters if adapter and spec.max_adapters else spec.max_versions
