"""The weight director: the only one that knows which versions exist, who holds and needs which, what is on its way, what may go.

    events -> director.handle(event) -> commands

An instance pulls what the turns of its jobs ask for, and nothing else; it is asked once. A version is taken from an instance in two
steps, so that nothing is ever sampled from weights that are gone: it is recalled from the rollout manager, and dropped when that has
said that nothing runs with it. A version leaves the store when nothing names it and nobody needs or pulls it. By what way a version
comes to an instance, and from which node to which, is in `routes.py`.
"""

from collections.abc import Iterable, Sequence
from typing import assert_never

from slackwater.control.weights import commands as do
from slackwater.control.weights import events as on
from slackwater.control.weights.routes import Routes, cargoes_of
from slackwater.control.weights.shelf import (
    Holder,
    VersionRecord,
    held_version,
    limit_of,
    with_copy,
)
from slackwater.model.cargo import Cargo
from slackwater.model.ids import InstanceId, JobId
from slackwater.policy.weights.holding import first_to_go, holders_wanted

_IN_PASSING = 1  # beyond its limit an instance takes one version while older ones are still in use

Out = list[do.WeightCommand]


class WeightDirector:
    """See the module. `check_integrity()` holds after every event."""

    def __init__(self, routes: Routes | None = None) -> None:
        self.routes = routes or Routes()
        self._versions: dict[str, VersionRecord] = {}
        self._newest: dict[tuple[JobId | None, str, str], str] = {}
        self._holders: dict[InstanceId, Holder] = {}
        self._needed: dict[str, VersionRecord] = {}
        self._numbers = 0
        self._clock = 0
        self._pulls = self._repeated_pulls = self._drops = 0
        self._waits_for_evicted = 0
        self._by_relay = self._by_delta = 0

    def handle(self, event: on.WeightEvent) -> Sequence[do.WeightCommand]:
        """Take one event; return what is to be done, in order."""
        out: Out = []
        match event:
            case on.WeightsPublished():
                self._published(event, out)
            case on.WeightsRetired(_, version):
                self._retired(version, out)
            case on.VersionNeeded():
                self._need(event, out)
            case on.HolderJoined(_, spec):
                self._holders[spec.instance] = holder = Holder(spec)
                self._welcome(holder, out)
            case on.HolderLeft(_, instance, rests):
                self._left(instance, rests, out)
            case on.InstanceReady():
                self._pulled(event, out)
            case on.PullFailed():
                self._pull_failed(event, out)
            case on.VersionFreed(_, instance, version):
                self._freed(instance, version, out)
            case _:
                self._of_relays(event, out)
        return out

    def _of_relays(
        self,
        event: on.RelayJoined | on.RelayLeft | on.CargoesStocked | on.CargoArrived | on.CargoBroke,
        out: Out,
    ) -> None:
        routes = self.routes
        match event:
            case on.RelayJoined(_, node, site):
                routes.joined(node, site, out)
            case on.RelayLeft(_, node):
                routes.left(node, out)
            case on.CargoesStocked(_, node, version, sizes):
                routes.stocked(node, version, sizes, out)
                if version in self._versions:
                    routes.named(version)
            case on.CargoArrived(_, node, version, base):
                routes.arrived(node, Cargo(version, base), out)
            case on.CargoBroke(_, node, version, base, source):
                routes.broke(node, Cargo(version, base), source, out)
            case _:
                assert_never(event)

    # ---- versions ----
    def _published(self, event: on.WeightsPublished, out: Out) -> None:
        record = self._versions.get(event.version)
        if record is None:
            self._numbers += 1
            record = VersionRecord(
                event.version, event.job, event.base_model, event.line, event.adapter, self._numbers
            )
            self._versions[event.version] = record
        record.retired = False
        self.routes.named(event.version)
        self._clock += 1
        record.needed_at = self._clock
        key = (event.job, event.base_model, event.line)
        before = self._newest.get(key)
        if before is not None and before != event.version and event.job is not None:
            if before in self._versions:
                self._versions[before].superseded = True
            homes = [h for h in self._holders.values() if before in h.offered]
        else:
            homes = [] if event.job is not None else self._able(record)
        self._newest[key] = event.version
        if event.sampled:
            for holder in homes:
                self._pull(holder, record, out)
        self._tidy(record, out)

    def _retired(self, version: str, out: Out) -> None:
        record = self._versions.get(version)
        if record is None:
            out.append(do.DeleteVersion(version))
            return
        record.retired = True
        self._let_go_of(record, out)

    def _let_go_of(self, record: VersionRecord, out: Out) -> None:
        """A retired version that no turn asks for: out of every instance, then out of the store."""
        if not record.retired or record.turns:
            return
        for holder in self._holders.values():
            if record.version in holder.offered:
                self._recall(holder, record.version, out)
        if not any(record.version in holder.all() for holder in self._holders.values()):
            self._forget(record)
            self.routes.forget(record.version, out)
            out.append(do.DeleteVersion(record.version))

    def _tidy(self, record: VersionRecord, out: Out) -> None:
        """Let the relays drop what no instance needs of a model's versions."""
        key = (record.job, record.base_model, record.line)
        line = [r for r in self._versions.values() if (r.job, r.base_model, r.line) == key]
        line.sort(key=lambda each: each.number)
        holders = self._holders.values()
        self.routes.tidy(
            [each.version for each in line],
            needed={each.version for each in line if each.turns},
            held={copy for holder in holders for copy in holder.copies},
            pulling={version for holder in holders for version in holder.pulling},
            out=out,
        )

    def _forget(self, record: VersionRecord) -> None:
        del self._versions[record.version]
        key = (record.job, record.base_model, record.line)
        if self._newest.get(key) == record.version:
            del self._newest[key]
        for holder in self._holders.values():
            holder.pulled_before.discard(record.version)

    def _need(self, event: on.VersionNeeded, out: Out) -> None:
        record = self._versions.get(event.version)
        if record is None:
            if not event.turns:
                return
            # Published before this director's time: nothing is known of it but who asks.
            self._numbers += 1
            record = VersionRecord(
                event.version, event.job, event.base_model, "", False, self._numbers
            )
            self._versions[event.version] = record
        self._clock += 1
        record.turns, record.needed_at = event.turns, self._clock
        if event.turns:
            self._needed[event.version] = record
            if event.waiting and record.evicted_at and not self._having(record):
                self._waits_for_evicted += event.turns
            self._spread(record, out, waiting=event.waiting)
            return
        self._needed.pop(event.version, None)
        for holder in list(self._holders.values()):
            if event.version in holder.offered:
                self._trim(holder, record.adapter, event.version, out)
        self._let_go_of(record, out)

    # ---- who pulls ----
    def _able(self, record: VersionRecord) -> list[Holder]:
        return [holder for holder in self._holders.values() if holder.may_hold(record)]

    def _having(self, record: VersionRecord) -> list[Holder]:
        return [holder for holder in self._able(record) if holder.has(record.version)]

    def _spread(self, record: VersionRecord, out: Out, *, waiting: bool = False) -> None:
        """Let as many instances pull the version as its turns can use; one more if turns wait and nobody is pulling."""
        able = self._able(record)
        having = [holder for holder in able if holder.has(record.version)]
        wanted = holders_wanted(record.turns, len(able))
        if waiting and not any(record.version in holder.pulling for holder in having):
            wanted = max(wanted, len(having) + 1)
        missing = [holder for holder in able if not holder.has(record.version)]
        missing.sort(key=lambda h: (len(h.pulling), len(h.offered), h.instance))
        for holder in missing[: max(wanted - len(having), 0)]:
            self._pull(holder, record, out)

    def _welcome(self, holder: Holder, out: Out) -> None:
        """A new instance: its base model's own weights, and what turns ask for now, the most wanted first."""
        for record in self._versions.values():
            if record.job is None and not record.retired and holder.may_hold(record):
                self._pull(holder, record, out)
        self._fill(holder, out)

    def _fill(self, holder: Holder, out: Out) -> None:
        """Let an instance with room pull what is short of holders: what nobody has first, what gave way last comes last."""
        short = [record for record in self._needed.values() if holder.may_hold(record)]
        short.sort(key=lambda r: (bool(self._having(r)), r.evicted_at, -r.turns, r.number))
        for record in short:
            if len(self._alike(holder.all(), record.adapter)) >= self._most(holder, record):
                continue
            able = self._able(record)
            having = sum(other.has(record.version) for other in able)
            if not holder.has(record.version) and having < holders_wanted(record.turns, len(able)):
                self._pull(holder, record, out)

    @staticmethod
    def _most(holder: Holder, record: VersionRecord) -> int:
        return limit_of(holder.spec, record.adapter) + _IN_PASSING

    def _pull(self, holder: Holder, record: VersionRecord, out: Out) -> None:
        version = record.version
        if holder.has(version):
            return
        if version in holder.recalled:  # it is still there: back into use
            holder.recalled.discard(version)
            holder.offered[version] = None
            out.append(do.OfferVersion(holder.instance, version))
            return
        taken = self._alike(holder.all(), record.adapter)
        if record.job is not None and len(taken) >= self._most(holder, record):
            if not self._alike(holder.recalled, record.adapter):
                self._recall_one(holder, record.adapter, out, needed_too=True)
            return  # once that is free, it is this one's turn
        holder.pulling.add(version)
        self._pulls += 1
        self._repeated_pulls += version in holder.pulled_before
        holder.pulled_before.add(version)
        out.append(self._by_the_best_way(holder, record, out))

    def _by_the_best_way(self, holder: Holder, record: VersionRecord, out: Out) -> do.PullWeights:
        """Whole or by deltas on a copy that will be in the instance's host memory, whichever is smaller; else from the store."""
        node, keep = holder.spec.node, not record.adapter
        way = self.routes.way(record.version, holder.copies_then(), node)
        if node is None or way is None or not cargoes_of(way):
            return do.PullWeights(holder.instance, record.version)
        self.routes.bring(node, way, out)
        self._by_delta += bool(way.deltas)
        self._by_relay += 1
        if keep:
            holder.coming[record.version] = "" if way.fetch_start else way.start
        return do.PullWeights(holder.instance, record.version, cargoes_of(way), keep)

    def _alike(self, names: Iterable[str], adapter: bool) -> list[VersionRecord]:
        """Those of the names that take memory of the same kind; a base model's own weights take none."""
        found = [self._versions[name] for name in names]
        return [record for record in found if record.adapter == adapter and record.job is not None]

    # ---- what instances say ----
    def _pulled(self, event: on.InstanceReady, out: Out) -> None:
        instance, version = event.instance, event.version
        holder = self._holders.get(instance)
        if holder is None or version not in holder.pulling:
            out.append(do.BlameInstance(instance, f"version {version} that was not asked for"))
            return
        holder.pulling.discard(version)
        changed = holder.coming.pop(version, "")
        if event.kept:
            holder.copies = with_copy(holder.copies, version, changed)
        elif changed:
            holder.copies = [copy for copy in holder.copies if copy != changed]
        record = self._versions[version]
        holder.offered[version] = None
        out.append(do.OfferVersion(instance, version))
        self._trim(holder, record.adapter, version, out)
        self._tidy(record, out)
        self._let_go_of(record, out)

    def _pull_failed(self, event: on.PullFailed, out: Out) -> None:
        """Say so; turns that still wait will ask again."""
        holder = self._holders.get(event.instance)
        if holder is not None and event.version not in holder.pulling:
            return
        if holder is not None:
            holder.pulling.discard(event.version)
            holder.pulled_before.discard(event.version)
            if changed := holder.coming.pop(event.version, ""):
                holder.copies = [copy for copy in holder.copies if copy != changed]
            self._let_go_of(self._versions[event.version], out)
        what = f"pull of {event.version} failed: {event.error}"
        out.append(do.BlameInstance(event.instance, what))

    def _trim(self, holder: Holder, adapter: bool, keep: str, out: Out) -> None:
        """Take from the instance what it holds beyond its limit and no turn asks for."""
        limit = limit_of(holder.spec, adapter)
        while len(self._alike(holder.offered, adapter)) > limit:
            if not self._recall_one(holder, adapter, out, keep=keep):
                return

    def _recall_one(
        self, holder: Holder, adapter: bool, out: Out, *, keep: str = "", needed_too: bool = False
    ) -> bool:
        held = [r for r in self._alike(holder.offered, adapter) if r.version != keep]
        seen = [held_version(record, self._elsewhere(record, holder)) for record in held]
        victim = first_to_go(seen, needed_too=needed_too)
        if victim is None:
            return False
        self._clock += 1
        self._versions[victim].evicted_at = self._clock
        self._recall(holder, victim, out)
        return True

    def _elsewhere(self, record: VersionRecord, holder: Holder) -> bool:
        others = self._holders.values()
        return any(record.version in other.offered for other in others if other is not holder)

    def _recall(self, holder: Holder, version: str, out: Out) -> None:
        del holder.offered[version]
        holder.recalled.add(version)
        out.append(do.RecallVersion(holder.instance, version))

    def _freed(self, instance: InstanceId, version: str, out: Out) -> None:
        holder = self._holders.get(instance)
        if holder is None or version not in holder.recalled:
            return
        holder.recalled.discard(version)
        self._drops += 1
        out.append(do.DropVersion(instance, version))
        self._let_go_of(self._versions[version], out)
        self._fill(holder, out)

    def _left(self, instance: InstanceId, rests: bool, out: Out) -> None:
        holder = self._holders.pop(instance, None)
        if holder is None:
            return
        held = sorted(holder.all())
        if rests:
            out.extend(
                do.DropVersion(instance, version)
                for version in held
                if self._versions[version].job is not None
            )
        for version in held:
            if version in self._versions:
                self._let_go_of(self._versions[version], out)
        for record in list(self._needed.values()):
            if record.version in held:
                self._spread(record, out)

    # ---- questions ----
    def pulling(self, instance: InstanceId) -> frozenset[str]:
        """What is on its way to an instance."""
        holder = self._holders.get(instance)
        return frozenset() if holder is None else frozenset(holder.pulling)

    def usable(self, instance: InstanceId) -> set[str]:
        """What turns may run with on an instance."""
        holder = self._holders.get(instance)
        return set() if holder is None else set(holder.offered)

    def knows(self, version: str) -> bool:
        """Whether the version exists, as far as anybody said."""
        return version in self._versions

    def versions_of(self, job: JobId) -> list[str]:
        """The versions that a job owns, oldest first."""
        return [record.version for record in self._versions.values() if record.job == job]

    def gauges(self) -> dict[str, float]:
        """For metrics: the present and the totals."""
        holders = self._holders.values()
        return {
            "versions": len(self._versions),
            "needed_versions": len(self._needed),
            "held_copies": sum(len(holder.offered) + len(holder.recalled) for holder in holders),
            "pulls_under_way": sum(len(holder.pulling) for holder in holders),
            "pulls": self._pulls,
            "repeated_pulls": self._repeated_pulls,
            "drops": self._drops,
            "pulls_by_relay": self._by_relay,
            "pulls_by_delta": self._by_delta,
            "cargoes_brought": self.routes.brought,
            "cargoes_over_slow_links": self.routes.crossed,
            "turns_that_waited_for_an_evicted_version": self._waits_for_evicted,
        }

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        for name, record in self._versions.items():
            assert record.version == name and record.turns >= 0
            assert (record.turns > 0) == (name in self._needed), f"{name}: need out of step"
            held = any(name in holder.all() for holder in self._holders.values())
            assert held or record.turns or not record.retired, f"{name} should be gone"
        assert self._needed.keys() <= self._versions.keys(), "a version that turns need is gone"
        self.routes.check_integrity()
        for instance, holder in self._holders.items():
            assert holder.instance == instance
            assert holder.coming.keys() <= holder.pulling, f"{instance}: a copy that nobody pulls"
            offered = set(holder.offered)
            assert not offered & holder.recalled and not holder.pulling & (
                offered | holder.recalled
            )
            for name in holder.all():
                assert name in self._versions, f"{instance} holds {name}, which is deleted"
                record = self._versions[name]
                assert holder.may_hold(record), f"{instance} has no business with {name}"
            for adapter in (False, True):
                most = limit_of(holder.spec, adapter) + _IN_PASSING
                taken = len(self._alike(holder.all(), adapter))
                assert taken <= most, f"{instance} has {taken} versions, room for {most}"
