"""Who pulls which version, over which route, and what an instance gives back for it."""

from slackwater.control.rollout.events import VersionOffered, VersionRecalled
from slackwater.control.weights import commands
from slackwater.control.weights.director_state import IN_PASSING, DirectorState, Out
from slackwater.control.weights.holder_versions import VersionHolder, VersionRecord, limit_of
from slackwater.control.weights.routes import Routes, payloads_of
from slackwater.policy.weights.holding import HeldVersion, choose_victim, count_wanted_holders


class PullScheduler:
    """Asks an instance once for a version; what it evicts is recalled from the manager first."""

    def __init__(self, state: DirectorState, routes: Routes) -> None:
        self._state = state
        self._routes = routes

    def spread(self, record: VersionRecord, out: Out, *, waiting: bool = False) -> None:
        """Let as many instances pull as its turns can use; one more if turns wait and none is."""
        able = self._state.able(record)
        having = [holder for holder in able if holder.has(record.version)]
        wanted = count_wanted_holders(record.turns, len(able))
        if waiting and not any(record.version in holder.pulling for holder in having):
            wanted = max(wanted, len(having) + 1)
        missing = [holder for holder in able if not holder.has(record.version)]
        missing.sort(key=lambda h: (len(h.pulling), len(h.offered), h.instance))
        for holder in missing[: max(wanted - len(having), 0)]:
            self.pull(holder, record, out)

    def welcome(self, holder: VersionHolder, out: Out) -> None:
        """A new instance pulls its base model's weights, then the most needed versions."""
        for record in self._state.versions.values():
            if record.job is None and not record.retired and holder.may_hold(record):
                self.pull(holder, record, out)
        self.fill(holder, out)

    def fill(self, holder: VersionHolder, out: Out) -> None:
        """Let an instance with room pull what lacks holders: first what nobody has."""
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
                self.pull(holder, record, out)

    @staticmethod
    def _most(holder: VersionHolder, record: VersionRecord) -> int:
        return limit_of(holder.spec, record.adapter) + IN_PASSING

    def pull(self, holder: VersionHolder, record: VersionRecord, out: Out) -> None:
        """Unless it has the version; if it is full, once another version has yielded."""
        state, version = self._state, record.version
        if holder.has(version):
            return
        if version in holder.recalled:  # it is still there: back into use
            holder.recalled.discard(version)
            holder.offered[version] = None
            out.append(VersionOffered(state.now_s, holder.instance, version))
            return
        taken = state.alike(holder.all(), record.adapter)
        if record.job is not None and len(taken) >= self._most(holder, record):
            if not state.alike(holder.recalled, record.adapter):
                self._recall_one(holder, record.adapter, out, needed_too=True)
            return  # once that is free, it is this one's turn
        holder.pulling.add(version)
        state.totals.pulls += 1
        state.totals.repeated_pulls += version in holder.pulled_before
        holder.pulled_before.add(version)
        out.append(self._choose_route(holder, record, out))

    def _choose_route(
        self, holder: VersionHolder, record: VersionRecord, out: Out
    ) -> commands.PullVersion:
        """From the node's relay, whole or by deltas on a copy (the smaller); or from the store."""
        node, keep, totals = holder.spec.node, not record.adapter, self._state.totals
        route = self._routes.find(record.version, holder.copies_then(), node)
        if node is None or route is None or not payloads_of(route):
            return commands.PullVersion(holder.instance, record.version)
        self._routes.bring(node, route, out)
        totals.by_delta += bool(route.deltas)
        totals.by_relay += 1
        totals.pulled_bytes += route.bytes
        totals.whole_bytes += self._routes.whole_bytes(record.version) or route.bytes
        if keep:
            holder.coming[record.version] = "" if route.fetch_start else route.start
        return commands.PullVersion(holder.instance, record.version, payloads_of(route), keep)

    # ---- what yields ----
    def trim(self, holder: VersionHolder, adapter: bool, keep: str, out: Out) -> None:
        """Take from the instance what it holds beyond its limit and no turn asks for."""
        limit = limit_of(holder.spec, adapter)
        while len(self._state.alike(holder.offered, adapter)) > limit:
            if not self._recall_one(holder, adapter, out, keep=keep):
                return

    def _recall_one(
        self,
        holder: VersionHolder,
        adapter: bool,
        out: Out,
        *,
        keep: str = "",
        needed_too: bool = False,
    ) -> bool:
        state = self._state
        held = [r for r in state.alike(holder.offered, adapter) if r.version != keep]
        seen = [self._to_held_version(record, holder) for record in held]
        victim = choose_victim(seen, needed_too=needed_too)
        if victim is None:
            return False
        state.versions[victim].evicted_at = state.tick()
        self.recall(holder, victim, out)
        return True

    def _to_held_version(self, record: VersionRecord, holder: VersionHolder) -> HeldVersion:
        version, others = record.version, self._state.holders.values()
        elsewhere = any(version in other.offered for other in others if other is not holder)
        needed = (record.turns, record.retired, record.superseded, record.needed_at)
        return HeldVersion(version, *needed, elsewhere)

    def recall(self, holder: VersionHolder, version: str, out: Out) -> None:
        """No turn is to begin with it there; it is dropped when none runs with it."""
        del holder.offered[version]
        holder.recalled.add(version)
        out.append(VersionRecalled(self._state.now_s, holder.instance, version))
