"""The state that the parts of the weight director share: versions, their holders, totals."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from slackwater.control.rollout.gates import TurnGate
from slackwater.control.weights.commands import WeightCommand
from slackwater.model.ids import InstanceId, JobId
from slackwater.model.instance import InstanceSpec

COPIES_KEPT = 2  # whole versions that an instance keeps in host memory, for deltas to build on


@dataclass(slots=True)
class VersionRecord:
    """One version. `number` is the order of publishing; `turns` counts live turns that need it."""

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
        """The model whose version this is: its job, base model and name."""
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
        """Whether turns may run with it there, now or soon."""
        return version in self.offered or version in self.pulling

    def may_hold(self, record: VersionRecord) -> bool:
        """Whether the instance runs the base model, and is not lent to another job."""
        spec = self.spec
        return spec.runs(record.base_model) and (spec.job is None or record.job in (None, spec.job))

    def all(self) -> set[str]:
        """All versions that take memory on the instance."""
        return {*self.offered, *self.recalled, *self.pulling}


def with_copy(copies: list[str], version: str, changed: str) -> list[str]:
    """The copies after one more, which replaces its base or the oldest."""
    left = [copy for copy in copies if copy not in (changed, version)]
    return [*left, version][-COPIES_KEPT:]


def limit_of(spec: InstanceSpec, adapter: bool) -> int:
    """How many versions of a kind the instance is to hold."""
    return spec.max_adapters if adapter and spec.max_adapters else spec.max_versions


IN_PASSING = 1  # beyond its limit an instance takes one version while older ones are still in use

Line = tuple[JobId | None, str, str]  # one model's versions: its job, base model and name


@dataclass(slots=True)
class Totals:
    """Since the director started."""

    pulls: int = 0
    repeated_pulls: int = 0
    drops: int = 0
    by_relay: int = 0
    by_delta: int = 0
    pulled_bytes: int = 0  # over relays
    whole_bytes: int = 0  # the same versions, each as a whole copy
    waits_for_evicted: int = 0


@dataclass(slots=True)
class DirectorState:
    """The director's state: `needed` by turns, `newest` of each model, `gates` of jobs that share
    nodes, as they were last open.
    """

    versions: dict[str, VersionRecord] = field(default_factory=dict)
    holders: dict[InstanceId, VersionHolder] = field(default_factory=dict)
    needed: dict[str, VersionRecord] = field(default_factory=dict)
    newest: dict[Line, str] = field(default_factory=dict)
    gates: dict[JobId, TurnGate] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    clock: int = 0
    now_s: float = 0.0  # of the current event
    out: list[WeightCommand] = field(default_factory=list)  # the commands that answer it
    numbers: int = 0

    def tick(self) -> int:
        """Advance the logical clock, which orders publishes, needs and evictions."""
        self.clock += 1
        return self.clock

    def add(
        self,
        version: str,
        job: JobId | None,
        base_model: str,
        line: str = "",
        adapter: bool = False,
    ) -> VersionRecord:
        self.numbers += 1
        record = VersionRecord(version, job, base_model, line, adapter, self.numbers)
        self.versions[version] = record
        return record

    def forget(self, record: VersionRecord) -> None:
        """Remove a version that was deleted."""
        del self.versions[record.version]
        if self.newest.get(record.of_line) == record.version:
            del self.newest[record.of_line]
        for holder in self.holders.values():
            holder.pulled_before.discard(record.version)

    def able(self, record: VersionRecord) -> list[VersionHolder]:
        """Instances that may hold the version: those where its job's turns may run, if any."""
        found = [holder for holder in self.holders.values() if holder.may_hold(record)]
        gate = None if record.job is None else self.gates.get(record.job)
        if gate is None:
            return found
        return [holder for holder in found if gate.admits(holder.spec)] or found

    def having(self, record: VersionRecord) -> list[VersionHolder]:
        """Instances that may hold the version and have it, or are pulling it."""
        return [holder for holder in self.able(record) if holder.has(record.version)]

    def alike(self, names: Iterable[str], adapter: bool) -> list[VersionRecord]:
        """The named versions that are adapters, or are not; without base models' own weights."""
        found = [self.versions[name] for name in names]
        return [record for record in found if record.adapter == adapter and record.job is not None]

    def check_integrity(self) -> None:
        held: set[str] = set().union(*(holder.all() for holder in self.holders.values()))
        for name, record in self.versions.items():
            assert record.version == name and record.turns >= 0
            assert (record.turns > 0) == (name in self.needed), f"{name}: need out of step"
            kept = name in held or record.turns or not record.retired
            assert kept, f"{name} should be gone"
        assert self.needed.keys() <= self.versions.keys(), "a version that turns need is gone"
        for instance, holder in self.holders.items():
            assert holder.instance == instance
            self._check(holder)

    def _check(self, holder: VersionHolder) -> None:
        instance, names = holder.instance, holder.all()
        assert holder.coming.keys() <= holder.pulling, f"{instance}: a copy that nobody pulls"
        apart = len(holder.offered) + len(holder.recalled) + len(holder.pulling)
        assert len(names) == apart, f"{instance} has a version in two states"
        taken = [0, 0]
        for name in names:
            record = self.versions.get(name)
            assert record is not None, f"{instance} holds {name}, which is deleted"
            assert holder.may_hold(record), f"{instance} has no business with {name}"
            taken[record.adapter] += record.job is not None
        for adapter in (False, True):
            most = limit_of(holder.spec, adapter) + IN_PASSING
            assert taken[adapter] <= most, f"{instance} has {taken} versions, room for {most}"
