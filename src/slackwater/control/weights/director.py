"""The weight director: which versions exist, who holds, needs and pulls them, and which may go.

    events -> director.handle(event) -> commands

An instance pulls only what its jobs' turns need, and is asked once. A version is recalled from the
rollout manager before it is dropped, so that nothing is sampled from weights that are gone. It
leaves the store when nothing names, needs or pulls it. `routes.py` decides over which route a
version comes; `pulls.py` who pulls and what yields.
"""

from collections.abc import Sequence
from typing import assert_never

from slackwater.control.rollout.events import (
    InstanceFaulted,
    InstanceJoined,
    InstanceLost,
    JobGated,
    VersionOffered,
)
from slackwater.control.rollout.facts import InstanceReleased
from slackwater.control.rollout.gates import TurnGate
from slackwater.control.weights import commands
from slackwater.control.weights import events as weight_events
from slackwater.control.weights.director_state import DirectorState, Out
from slackwater.control.weights.holder_versions import VersionHolder, VersionRecord, with_copy
from slackwater.control.weights.pulls import PullScheduler
from slackwater.control.weights.routes import Routes
from slackwater.model.ids import InstanceId, JobId
from slackwater.model.payload import Payload


class WeightDirector:
    """See the module. `check_integrity()` holds after every event."""

    def __init__(self, routes: Routes | None = None) -> None:
        self.routes = routes or Routes()
        self._books = DirectorState()
        self._pulls = PullScheduler(self._books, self.routes)

    def handle(self, event: weight_events.WeightEvent) -> Sequence[commands.WeightCommand]:
        """Take one event; return what is to be done, in order."""
        out: Out = []
        self._books.now_s = event.now_s
        match event:
            case weight_events.WeightsPublished():
                self._published(event, out)
            case weight_events.WeightsRetired(_, version):
                self._retired(version, out)
            case weight_events.VersionNeeded():
                self._need(event, out)
            case JobGated(_, job, gate):
                self._gated(job, gate, out)
            case InstanceJoined(_, spec):
                self._books.holders[spec.instance] = holder = VersionHolder(spec)
                self._pulls.welcome(holder, out)
            case InstanceLost(_, instance):
                self._left(instance, False, out)
            case InstanceReleased(_, instance, rests):
                self._left(instance, rests, out)
            case weight_events.InstanceReady():
                self._pulled(event, out)
            case weight_events.PullFailed():
                self._pull_failed(event, out)
            case weight_events.VersionFreed(_, instance, version):
                self._freed(instance, version, out)
            case _:
                self._of_relays(event, out)
        return out

    def _of_relays(self, event: weight_events.RelayEvent, out: Out) -> None:
        routes = self.routes
        match event:
            case weight_events.RelayJoined(_, node, site):
                routes.joined(node, site, out)
            case weight_events.RelayLeft(_, node):
                routes.left(node, out)
            case weight_events.PayloadsStocked(_, node, version, sizes):
                routes.stocked(node, version, sizes, out)
                if version in self._books.versions:
                    routes.named(version)
            case weight_events.PayloadArrived(_, node, version, base):
                routes.arrived(node, Payload(version, base), out)
            case weight_events.PayloadFailed(_, node, version, base, source):
                routes.broke(node, Payload(version, base), source, out)
            case _:
                assert_never(event)

    def _gated(self, job: JobId, gate: TurnGate | None, out: Out) -> None:
        """Its turns run elsewhere from now on: what they need goes there."""
        books = self._books
        if gate is None:
            books.gates.pop(job, None)
        elif gate.nodes and books.gates.get(job) != (place := TurnGate(gate.nodes)):
            books.gates[job] = place
            for record in [one for one in books.needed.values() if one.job == job]:
                self._pulls.spread(record, out)

    # ---- versions ----
    def _published(self, event: weight_events.WeightsPublished, out: Out) -> None:
        record = self._books.versions.get(event.version)
        if record is None:
            record = self._books.add(
                event.version, event.job, event.base_model, event.line, event.adapter
            )
        record.retired = False
        self.routes.named(event.version)
        record.needed_at = self._books.tick()
        key = (event.job, event.base_model, event.line)
        before = self._books.newest.get(key)
        if before is not None and before != event.version and event.job is not None:
            if before in self._books.versions:
                self._books.versions[before].superseded = True
            homes = [h for h in self._books.holders.values() if before in h.offered]
        else:
            homes = [] if event.job is not None else self._books.able(record)
        self._books.newest[key] = event.version
        if event.sampled:
            for holder in homes:
                self._pulls.pull(holder, record, out)
        self._tidy(record, out)

    def _retired(self, version: str, out: Out) -> None:
        record = self._books.versions.get(version)
        if record is None:
            out.append(commands.DeleteVersion(version))
            return
        record.retired = True
        self._let_go_of(record, out)

    def _let_go_of(self, record: VersionRecord, out: Out) -> None:
        """A retired version that no turn asks for: out of every instance, then out of the store."""
        if not record.retired or record.turns:
            return
        for holder in self._books.holders.values():
            if record.version in holder.offered:
                self._pulls.recall(holder, record.version, out)
        if not any(record.version in holder.all() for holder in self._books.holders.values()):
            self._books.forget(record)
            self.routes.forget(record.version, out)
            out.append(commands.DeleteVersion(record.version))

    def _tidy(self, record: VersionRecord, out: Out) -> None:
        """Let the relays drop what no instance needs of a model's versions."""
        line = [r for r in self._books.versions.values() if r.of_line == record.of_line]
        line.sort(key=lambda each: each.number)
        holders = self._books.holders.values()
        self.routes.tidy(
            [each.version for each in line],
            needed={each.version for each in line if each.turns},
            held={copy for holder in holders for copy in holder.copies},
            pulling={version for holder in holders for version in holder.pulling},
            out=out,
        )

    def _need(self, event: weight_events.VersionNeeded, out: Out) -> None:
        record = self._books.versions.get(event.version)
        if record is None:
            if not event.turns:
                return
            # Published before this director's time: nothing is known of it but who asks.
            record = self._books.add(event.version, event.job, event.base_model)
        record.turns, record.needed_at = event.turns, self._books.tick()
        if event.turns:
            self._books.needed[event.version] = record
            if event.waiting and record.evicted_at and not self._books.having(record):
                self._books.totals.waits_for_evicted += event.turns
            self._pulls.spread(record, out, waiting=event.waiting)
            return
        self._books.needed.pop(event.version, None)
        for holder in list(self._books.holders.values()):
            if event.version in holder.offered:
                self._pulls.trim(holder, record.adapter, event.version, out)
        self._let_go_of(record, out)

    # ---- what instances say ----
    def _pulled(self, event: weight_events.InstanceReady, out: Out) -> None:
        instance, version = event.instance, event.version
        holder = self._books.holders.get(instance)
        if holder is None or version not in holder.pulling:
            what = f"version {version} that was not asked for"
            out.append(InstanceFaulted(event.now_s, instance, what))
            return
        holder.pulling.discard(version)
        changed = holder.coming.pop(version, "")
        if event.kept:
            holder.copies = with_copy(holder.copies, version, changed)
        elif changed:
            holder.copies = [copy for copy in holder.copies if copy != changed]
        record = self._books.versions[version]
        holder.offered[version] = None
        out.append(VersionOffered(event.now_s, instance, version))
        self._pulls.trim(holder, record.adapter, version, out)
        self._tidy(record, out)
        self._let_go_of(record, out)

    def _pull_failed(self, event: weight_events.PullFailed, out: Out) -> None:
        """Say so; turns that still wait will ask again."""
        holder = self._books.holders.get(event.instance)
        if holder is not None and event.version not in holder.pulling:
            return
        if holder is not None:
            holder.pulling.discard(event.version)
            holder.pulled_before.discard(event.version)
            if changed := holder.coming.pop(event.version, ""):
                holder.copies = [copy for copy in holder.copies if copy != changed]
            self._let_go_of(self._books.versions[event.version], out)
        what = f"pull of {event.version} failed: {event.error}"
        out.append(InstanceFaulted(event.now_s, event.instance, what))

    def _freed(self, instance: InstanceId, version: str, out: Out) -> None:
        holder = self._books.holders.get(instance)
        if holder is None or version not in holder.recalled:
            return
        holder.recalled.discard(version)
        self._books.totals.drops += 1
        out.append(commands.DropVersion(instance, version))
        self._let_go_of(self._books.versions[version], out)
        self._pulls.fill(holder, out)

    def _left(self, instance: InstanceId, rests: bool, out: Out) -> None:
        holder = self._books.holders.pop(instance, None)
        if holder is None:
            return
        held = sorted(holder.all())
        if rests:
            out.extend(
                commands.DropVersion(instance, version)
                for version in held
                if self._books.versions[version].job is not None
            )
        for version in held:
            if version in self._books.versions:
                self._let_go_of(self._books.versions[version], out)
        for record in list(self._books.needed.values()):
            if record.version in held:
                self._pulls.spread(record, out)

    # ---- questions ----
    def pulling(self, instance: InstanceId) -> frozenset[str]:
        holder = self._books.holders.get(instance)
        return frozenset() if holder is None else frozenset(holder.pulling)

    def usable(self, instance: InstanceId) -> set[str]:
        """What turns may run with on an instance."""
        holder = self._books.holders.get(instance)
        return set() if holder is None else set(holder.offered)

    def knows(self, version: str) -> bool:
        """Whether the version is known to exist."""
        return version in self._books.versions

    def versions_of(self, job: JobId) -> list[str]:
        """The versions that a job owns, oldest first."""
        return [record.version for record in self._books.versions.values() if record.job == job]

    def job_of(self, version: str) -> JobId | None:
        """Whose version it is; a base model's own weights are nobody's."""
        record = self._books.versions.get(version)
        return None if record is None else record.job

    def newest(self) -> list[tuple[VersionRecord, int, int]]:
        """The last version of every line, how many instances offer it, and how many pull it."""
        books, found = self._books, []
        for version in books.newest.values():
            able = books.able(books.versions[version])
            offered = sum(version in holder.offered for holder in able)
            pulling = sum(version in holder.pulling for holder in able)
            found.append((books.versions[version], offered, pulling))
        return found

    def gauges(self) -> dict[str, float]:
        """For metrics: the present and the totals."""
        totals, holders = self._books.totals, self._books.holders.values()
        return {
            "versions": len(self._books.versions),
            "needed_versions": len(self._books.needed),
            "held_copies": sum(len(holder.offered) + len(holder.recalled) for holder in holders),
            "pulls_under_way": sum(len(holder.pulling) for holder in holders),
            "pulls": totals.pulls,
            "repeated_pulls": totals.repeated_pulls,
            "drops": totals.drops,
            "pulls_by_relay": totals.by_relay,
            "pulls_by_delta": totals.by_delta,
            "pulled_bytes": totals.pulled_bytes,
            "pulled_whole_bytes": totals.whole_bytes,
            "payloads_brought": self.routes.brought,
            "payloads_over_slow_links": self.routes.crossed,
            "turns_that_waited_for_an_evicted_version": totals.waits_for_evicted,
        }

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        self._books.check_integrity()
        self.routes.check_integrity()
