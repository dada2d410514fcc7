"""The state that the parts of the weight director share: versions, their holders, totals."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from slackwater.control.rollout.gates import TurnGate
from slackwater.control.weights.commands import WeightCommand
from slackwater.control.weights.holder_versions import VersionHolder, VersionRecord, limit_of
from slackwater.model.ids import InstanceId, JobId

IN_PASSING = 1  # beyond its limit an instance takes one version while older ones are still in use

Out = list[WeightCommand]
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
    now_s: float = 0.0  # of the event that is being handled
    numbers: int = 0

    def tick(self) -> int:
        """The next moment, for what came before what."""
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
        """The version exists no more."""
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
        """Those of them that have it, or are pulling it."""
        return [holder for holder in self.able(record) if holder.has(record.version)]

    def alike(self, names: Iterable[str], adapter: bool) -> list[VersionRecord]:
        """Those that take the same kind of memory; a base model's own weights take none."""
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
