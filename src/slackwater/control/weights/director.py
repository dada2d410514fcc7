"""The weight director: which versions exist, who holds, needs and pulls them, and which may go.

    events -> director.handle(event) -> commands

An instance pulls only what its jobs' turns need, and is asked once. A version is recalled from the
rollout manager before it is dropped, so that nothing is sampled from weights that are gone. It
leaves the store when nothing names, needs or pulls it. `routes.py` decides over which route a
version comes; `PullScheduler` who pulls and what yields.
"""

from collections.abc import Sequence
from typing import assert_never

from slackwater.control.rollout.events import (
    InstanceFaulted,
    InstanceJoined,
    InstanceLost,
    JobGated,
    VersionOffered,
    VersionRecalled,
)
from slackwater.control.rollout.facts import InstanceReleased
from slackwater.control.rollout.gates import TurnGate
from slackwater.control.weights import commands
from slackwater.control.weights import events as weight_events
from slackwater.control.weights.director_state import (
    IN_PASSING,
    DirectorState,
    VersionHolder,
    VersionRecord,
    limit_of,
    with_copy,
)
from slackwater.control.weights.routes import Routes, payloads_of
from slackwater.model.ids import InstanceId, JobId
from slackwater.model.payload import Payload
from slackwater.policy.weights.holding import HeldVersion, choose_victim, count_wanted_holders
from slackwater.policy.weights.source import SourcePolicy


class WeightDirector:
    """See the module. `check_integrity()` holds after every event."""

    def __init__(self, source: SourcePolicy | None = None) -> None:
        self._state = DirectorState()
        self.routes = Routes(self._state, source)
        self._pulls = PullScheduler(self._state, self.routes)

    def handle(self, event: weight_events.WeightEvent) -> Sequence[commands.WeightCommand]:
        state = self._state
        state.now_s, state.out = event.now_s, []
        match event:
            case weight_events.VersionNeeded():  # the most frequent
                self._need(event)
            case weight_events.WeightsPublished():
                self._publish(event)
            case weight_events.WeightsRetired(_, version):
                self._retire(version)
            case JobGated(_, job, gate):
                self._apply_gate(job, gate)
            case InstanceJoined(_, spec):
                self._state.holders[spec.instance] = holder = VersionHolder(spec)
                self._pulls.welcome(holder)
            case InstanceLost(_, instance):
                self._remove_holder(instance, False)
            case InstanceReleased(_, instance, rests):
                self._remove_holder(instance, rests)
            case weight_events.InstanceReady():
                self._finish_pull(event)
            case weight_events.PullFailed():
                self._fail_pull(event)
            case weight_events.VersionFreed(_, instance, version):
                self._drop(instance, version)
            case _:
                self._handle_relay_event(event)
        return state.out

    def _handle_relay_event(self, event: weight_events.RelayEvent) -> None:
        routes = self.routes
        match event:
            case weight_events.RelayJoined(_, node, site):
                routes.add_node(node, site)
            case weight_events.RelayLeft(_, node):
                routes.remove_node(node)
            case weight_events.PayloadsStocked(_, node, version, sizes):
                routes.record_stock(node, version, sizes)
                if version in self._state.versions:
                    routes.record_publish(version)
            case weight_events.PayloadArrived(_, node, version, base):
                routes.finish_fetch(node, Payload(version, base))
            case weight_events.PayloadFailed(_, node, version, base, source):
                routes.fail_fetch(node, Payload(version, base), source)
            case _:
                assert_never(event)

    def _apply_gate(self, job: JobId, gate: TurnGate | None) -> None:
        """The job's turns run on other nodes: their versions must be there, too."""
        state = self._state
        if gate is None:
            state.gates.pop(job, None)
        elif gate.nodes and state.gates.get(job) != (place := TurnGate(gate.nodes)):
            state.gates[job] = place
            for record in [one for one in state.needed.values() if one.job == job]:
                self._pulls.spread(record)

    # ---- versions ----
    def _publish(self, event: weight_events.WeightsPublished) -> None:
        record = self._state.versions.get(event.version)
        if record is None:
            record = self._state.add(
                event.version, event.job, event.base_model, event.line, event.adapter
            )
        record.retired = False
        self.routes.record_publish(event.version)
        record.needed_at = self._state.tick()
        key = (event.job, event.base_model, event.line)
        before = self._state.newest.get(key)
        if before is not None and before != event.version and event.job is not None:
            if before in self._state.versions:
                self._state.versions[before].superseded = True
            homes = [h for h in self._state.holders.values() if before in h.offered]
        else:
            homes = [] if event.job is not None else self._state.able(record)
        self._state.newest[key] = event.version
        if event.sampled:
            for holder in homes:
                self._pulls.pull(holder, record)
        self._tidy(record)

    def _retire(self, version: str) -> None:
        record = self._state.versions.get(version)
        if record is None:
            self._state.out.append(commands.DeleteVersion(version))
            return
        record.retired = True
        self._delete_unneeded(record)

    def _delete_unneeded(self, record: VersionRecord) -> None:
        """Delete a retired version that no turn needs: from every instance, then from the store."""
        if not record.retired or record.turns:
            return
        for holder in self._state.holders.values():
            if record.version in holder.offered:
                self._pulls.recall(holder, record.version)
        if not any(record.version in holder.all() for holder in self._state.holders.values()):
            self._state.forget(record)
            self.routes.forget(record.version)
            self._state.out.append(commands.DeleteVersion(record.version))

    def _tidy(self, record: VersionRecord) -> None:
        """Drop the payloads of a model's versions that no instance needs."""
        line = [r for r in self._state.versions.values() if r.of_line == record.of_line]
        line.sort(key=lambda each: each.number)
        holders = self._state.holders.values()
        self.routes.tidy(
            [each.version for each in line],
            needed={each.version for each in line if each.turns},
            held={copy for holder in holders for copy in holder.copies},
            pulling={version for holder in holders for version in holder.pulling},
        )

    def _need(self, event: weight_events.VersionNeeded) -> None:
        record = self._state.versions.get(event.version)
        if record is None:
            if not event.turns:
                return
            # Published before this director started: only its needs are known.
            record = self._state.add(event.version, event.job, event.base_model)
        record.turns, record.needed_at = event.turns, self._state.tick()
        if event.turns:
            self._state.needed[event.version] = record
            if event.waiting and record.evicted_at and not self._state.having(record):
                self._state.totals.waits_for_evicted += event.turns
            self._pulls.spread(record, waiting=event.waiting)
            return
        self._state.needed.pop(event.version, None)
        for holder in list(self._state.holders.values()):
            if event.version in holder.offered:
                self._pulls.trim(holder, record.adapter, event.version)
        self._delete_unneeded(record)

    # ---- reports of instances ----
    def _finish_pull(self, event: weight_events.InstanceReady) -> None:
        instance, version = event.instance, event.version
        holder = self._state.holders.get(instance)
        if holder is None or version not in holder.pulling:
            what = f"version {version} that was not asked for"
            self._state.out.append(InstanceFaulted(event.now_s, instance, what))
            return
        holder.pulling.discard(version)
        changed = holder.coming.pop(version, "")
        if event.kept:
            holder.copies = with_copy(holder.copies, version, changed)
        elif changed:
            holder.copies = [copy for copy in holder.copies if copy != changed]
        record = self._state.versions[version]
        holder.offered[version] = None
        self._state.out.append(VersionOffered(event.now_s, instance, version))
        self._pulls.trim(holder, record.adapter, version)
        self._tidy(record)
        self._delete_unneeded(record)

    def _fail_pull(self, event: weight_events.PullFailed) -> None:
        """Report the fault; turns that still wait will request the version again."""
        holder = self._state.holders.get(event.instance)
        if holder is not None and event.version not in holder.pulling:
            return
        if holder is not None:
            holder.pulling.discard(event.version)
            holder.pulled_before.discard(event.version)
            if changed := holder.coming.pop(event.version, ""):
                holder.copies = [copy for copy in holder.copies if copy != changed]
            self._delete_unneeded(self._state.versions[event.version])
        what = f"pull of {event.version} failed: {event.error}"
        self._state.out.append(InstanceFaulted(event.now_s, event.instance, what))

    def _drop(self, instance: InstanceId, version: str) -> None:
        holder = self._state.holders.get(instance)
        if holder is None or version not in holder.recalled:
            return
        holder.recalled.discard(version)
        self._state.totals.drops += 1
        self._state.out.append(commands.DropVersion(instance, version))
        self._delete_unneeded(self._state.versions[version])
        self._pulls.fill(holder)

    def _remove_holder(self, instance: InstanceId, rests: bool) -> None:
        holder = self._state.holders.pop(instance, None)
        if holder is None:
            return
        held = sorted(holder.all())
        if rests:
            self._state.out.extend(
                commands.DropVersion(instance, version)
                for version in held
                if self._state.versions[version].job is not None
            )
        for version in held:
            if version in self._state.versions:
                self._delete_unneeded(self._state.versions[version])
        for record in list(self._state.needed.values()):
            if record.version in held:
                self._pulls.spread(record)

    # ---- queries ----
    def pulling(self, instance: InstanceId) -> frozenset[str]:
        holder = self._state.holders.get(instance)
        return frozenset() if holder is None else frozenset(holder.pulling)

    def usable(self, instance: InstanceId) -> set[str]:
        """The versions that turns may run with on an instance."""
        holder = self._state.holders.get(instance)
        return set() if holder is None else set(holder.offered)

    def knows(self, version: str) -> bool:
        """Whether the version is known to exist."""
        return version in self._state.versions

    def versions_of(self, job: JobId) -> list[str]:
        """The versions that a job owns, oldest first."""
        return [record.version for record in self._state.versions.values() if record.job == job]

    def job_of(self, version: str) -> JobId | None:
        """The job that owns a version; None for a base model's own weights."""
        record = self._state.versions.get(version)
        return None if record is None else record.job

    def newest(self) -> list[tuple[VersionRecord, int, int]]:
        """The last version of every line, how many instances offer it, and how many pull it."""
        state, found = self._state, []
        for version in state.newest.values():
            able = state.able(state.versions[version])
            offered = sum(version in holder.offered for holder in able)
            pulling = sum(version in holder.pulling for holder in able)
            found.append((state.versions[version], offered, pulling))
        return found

    def gauges(self) -> dict[str, float]:
        """Current values and totals, for metrics."""
        totals, holders = self._state.totals, self._state.holders.values()
        return {
            "versions": len(self._state.versions),
            "needed_versions": len(self._state.needed),
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
        self._state.check_integrity()
        self.routes.check_integrity()


class PullScheduler:
    """Decides which instance pulls which version, and which it evicts."""

    def __init__(self, state: DirectorState, routes: Routes) -> None:
        self._state = state
        self._routes = routes

    def spread(self, record: VersionRecord, *, waiting: bool = False) -> None:
        """Let as many instances pull as turns can use; one more if turns wait and none pulls."""
        able = self._state.able(record)
        missing = [holder for holder in able if not holder.has(record.version)]
        if not missing:
            return
        having = [holder for holder in able if holder.has(record.version)]
        wanted = count_wanted_holders(record.turns, len(able))
        if waiting and not any(record.version in holder.pulling for holder in having):
            wanted = max(wanted, len(having) + 1)
        missing.sort(key=lambda h: (len(h.pulling), len(h.offered), h.instance))
        for holder in missing[: max(wanted - len(having), 0)]:
            self.pull(holder, record)

    def welcome(self, holder: VersionHolder) -> None:
        """A new instance pulls its base model's weights, then the most needed versions."""
        for record in self._state.versions.values():
            if record.job is None and not record.retired and holder.may_hold(record):
                self.pull(holder, record)
        self.fill(holder)

    def fill(self, holder: VersionHolder) -> None:
        """Let an instance with room pull versions that lack holders, first those without any."""
        state = self._state
        short = [record for record in state.needed.values() if holder.may_hold(record)]
        short.sort(key=lambda r: (bool(state.having(r)), r.evicted_at, -r.turns, r.number))
        for record in short:
            if len(state.alike(holder.all(), record.adapter)) >= self._most(holder, record):
                continue
            able = state.able(record)
            having = sum(other.has(record.version) for other in able)
            lacks = not holder.has(record.version) and any(other is holder for other in able)
            if lacks and having < count_wanted_holders(record.turns, len(able)):
                self.pull(holder, record)

    @staticmethod
    def _most(holder: VersionHolder, record: VersionRecord) -> int:
        return limit_of(holder.spec, record.adapter) + IN_PASSING

    def pull(self, holder: VersionHolder, record: VersionRecord) -> None:
        """Pull the version unless the instance has it; if that is full, evict another first."""
        state, version = self._state, record.version
        if holder.has(version):
            return
        if version in holder.recalled:  # it is still there: back into use
            holder.recalled.discard(version)
            holder.offered[version] = None
            self._state.out.append(VersionOffered(state.now_s, holder.instance, version))
            return
        taken = state.alike(holder.all(), record.adapter)
        if record.job is not None and len(taken) >= self._most(holder, record):
            if not state.alike(holder.recalled, record.adapter):
                self._recall_one(holder, record.adapter, include_needed=True)
            return  # it is pulled once the evicted version is dropped
        holder.pulling.add(version)
        state.totals.pulls += 1
        state.totals.repeated_pulls += version in holder.pulled_before
        holder.pulled_before.add(version)
        self._state.out.append(self._choose_route(holder, record))

    def _choose_route(self, holder: VersionHolder, record: VersionRecord) -> commands.PullVersion:
        """From the node's relay, whole or by deltas on a copy (the smaller); or from the store."""
        node, keep, totals = holder.spec.node, not record.adapter, self._state.totals
        route = self._routes.find(record.version, holder.copies_then(), node)
        if node is None or route is None or not payloads_of(route):
            return commands.PullVersion(holder.instance, record.version)
        self._routes.bring(node, route)
        totals.by_delta += bool(route.deltas)
        totals.by_relay += 1
        totals.pulled_bytes += route.bytes
        totals.whole_bytes += self._routes.whole_bytes(record.version) or route.bytes
        if keep:
            holder.coming[record.version] = "" if route.fetch_start else route.start
        return commands.PullVersion(holder.instance, record.version, payloads_of(route), keep)

    # ---- eviction ----
    def trim(self, holder: VersionHolder, adapter: bool, keep: str) -> None:
        """Recall versions beyond the instance's limit that no turn needs."""
        limit = limit_of(holder.spec, adapter)
        while len(self._state.alike(holder.offered, adapter)) > limit:
            if not self._recall_one(holder, adapter, keep=keep):
                return

    def _recall_one(
        self,
        holder: VersionHolder,
        adapter: bool,
        *,
        keep: str = "",
        include_needed: bool = False,
    ) -> bool:
        state = self._state
        held = [r for r in state.alike(holder.offered, adapter) if r.version != keep]
        seen = [self._to_held_version(record, holder) for record in held]
        victim = choose_victim(seen, include_needed=include_needed)
        if victim is None:
            return False
        state.versions[victim].evicted_at = state.tick()
        self.recall(holder, victim)
        return True

    def _to_held_version(self, record: VersionRecord, holder: VersionHolder) -> HeldVersion:
        version, others = record.version, self._state.holders.values()
        elsewhere = any(version in other.offered for other in others if other is not holder)
        needed = (record.turns, record.retired, record.superseded, record.needed_at)
        return HeldVersion(version, *needed, elsewhere)

    def recall(self, holder: VersionHolder, version: str) -> None:
        """Start no turn with the version there; it is dropped when none runs with it."""
        del holder.offered[version]
        holder.recalled.add(version)
        self._state.out.append(VersionRecalled(self._state.now_s, holder.instance, version))
