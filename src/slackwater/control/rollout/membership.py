"""Instances that join, work, drain and leave; leases, stalls and faults."""

from slackwater.control.rollout import events
from slackwater.control.rollout.commands import ReleaseInstance
from slackwater.control.rollout.instances import InstanceRecord
from slackwater.control.rollout.manager_state import ManagerState, Out
from slackwater.control.weights.events import VersionFreed
from slackwater.model.instance import InstanceKind


class Membership:
    """Handles everything that happens to an instance."""

    def __init__(self, books: ManagerState) -> None:
        self._books = books
        self._lent_slowness = 1.0  # of the lent engine that was measured last

    def joined(self, event: events.InstanceJoined, out: Out) -> None:
        """Take it in; it works once it is offered with a version."""
        books, spec = self._books, event.spec
        if spec.instance in books.instances.records:
            self.gone(books.instances.records[spec.instance], "joined again", event.now_s, out)
        record = InstanceRecord(spec, event.now_s)
        if spec.kind is InstanceKind.BORROWED:
            record.load.slowness = self._lent_slowness
        books.instances.add(record)

    def offered(self, event: events.VersionOffered, out: Out) -> None:
        """Turns may run with the version there from now on."""
        record = self._heard(event, out)
        if record is None:
            return
        record.recalled.discard(event.version)
        record.versions.add(event.version)
        record.progress_s = event.now_s
        self._books.room_changed(record, event.now_s, out)

    def recalled(self, event: events.VersionRecalled, out: Out) -> None:
        """No turn starts with the version there; `settle` reports when the last has ended."""
        record = self._books.instances.records.get(event.instance)
        if record is None or event.version not in record.versions:
            return
        record.versions.discard(event.version)
        record.recalled.add(event.version)
        self._books.instances.recalling.add(event.instance)
        record.refresh()
        self._books.instances.changed()
        self._unbind(record, event.now_s, out)

    def settle(self, now_s: float, out: Out) -> None:
        """After every event: recalled versions that nothing runs with are free."""
        fleet = self._books.instances
        for instance in sorted(fleet.recalling):
            record = fleet.records[instance]
            for version in record.freed():
                record.recalled.discard(version)
                out.append(VersionFreed(now_s, instance, version))
            if not record.recalled:
                fleet.recalling.discard(instance)

    def blamed(self, event: events.InstanceFaulted, out: Out) -> None:
        """The weight director found it at fault."""
        record = self._heard(event, out)
        if record is not None:
            self.fault(record, event.what, event.now_s, out)

    def heartbeat(self, event: events.InstanceHeartbeat, out: Out) -> None:
        """Renew the lease and learn the load."""
        record = self._heard(event, out)
        if record is None:
            return
        self._learn_rate(record, event)
        produced = event.produced_tokens + event.prefilled_tokens
        if produced > record.produced_tokens + record.prefilled_tokens:
            record.progress_s = event.now_s
        record.produced_tokens = event.produced_tokens
        record.prefilled_tokens = event.prefilled_tokens
        record.reported_s, record.reported_running = event.now_s, event.running
        record.reported_kv_tokens = event.kv_used_tokens
        load = record.load
        load.waiting = min(event.waiting, load.in_flight)
        load.kv_load_tokens = event.kv_used_tokens
        if event.stalled and not record.stalled:
            self._stall(record, "it reported a stall", event.now_s, out)
        elif record.stalled and not event.stalled:
            record.stalled = False
            self._books.room_changed(record, event.now_s, out)
        else:
            self._books.dispatcher.fill(record, event.now_s, out)

    def _learn_rate(self, record: InstanceRecord, event: events.InstanceHeartbeat) -> None:
        """Reports with about the same batch and no prefill between them show the decode rate.

        The time of a step is fitted over many pairs of reports between which it was busy.
        """
        since_s = event.now_s - record.reported_s if record.reported_s is not None else 0.0
        made = event.produced_tokens - record.produced_tokens
        if since_s <= 0 or made <= 0:
            record.load.produced_per_s = 0.0
            return
        record.load.produced_per_s = made / since_s
        steady = abs(event.running - record.reported_running) <= max(1, event.running // 8)
        if steady and event.prefilled_tokens == record.prefilled_tokens:
            self._books.profile.observe(event.running, made / since_s)
        fewer, more = sorted((event.running, record.reported_running))
        if 0 < more <= 2 * fewer:
            batch = (fewer + more) / 2
            steps = made / batch
            context = (event.kv_used_tokens + record.reported_kv_tokens) / 2
            prefilled = max(event.prefilled_tokens - record.prefilled_tokens, 0)
            step_s, beside = since_s / steps, prefilled / steps
            law = self._books.step_time.model
            if law is not None:
                record.slowness.observe(step_s, law.step_s(batch, context, beside))
                record.load.slowness = record.slowness.factor
            slowness = record.load.slowness
            # Steps of a lent engine wait for its service's: they say little of the others'.
            if record.spec.kind is InstanceKind.BORROWED and law is not None:
                self._lent_slowness = slowness
            else:
                self._books.step_time.observe(batch, context, step_s, beside, slowness)

    def notice(self, event: events.InstanceNotice, out: Out) -> None:
        """It will be taken away: move its turns while both ends still live."""
        record = self._heard(event, out)
        if record is not None:
            record.leaves_at_s = event.leaves_at_s
            self.hand_over(record, "notice of removal", event.now_s, out)

    def drain_asked(self, event: events.DrainAsked, out: Out) -> None:
        """An operator's wish."""
        record = self._books.instances.records.get(event.instance)
        if record is not None:
            self._drain(record, event.now_s, out)
            if event.move_turns:
                self.evacuate(record, event.now_s, out)
            self.release_if_empty(record, "drained", out)

    def hand_over(self, record: InstanceRecord, why: str, now_s: float, out: Out) -> None:
        """Move all turns off and let it go, now."""
        self._drain(record, now_s, out)
        self.evacuate(record, now_s, out)
        self.release_if_empty(record, why, out)

    def _drain(self, record: InstanceRecord, now_s: float, out: Out) -> None:
        record.draining = True
        record.refresh()
        self._books.instances.changed()
        self._unbind(record, now_s, out)

    def evacuate(self, record: InstanceRecord, now_s: float, out: Out) -> None:
        """Move everything off a living instance that takes no more."""
        for turn in list(record.attempts.values()):
            self._books.dispatcher.recall(turn, out)
            self._books.resume(turn, now_s, out)

    def release_if_empty(self, record: InstanceRecord, why: str, out: Out) -> None:
        """Let a draining instance go once nothing of ours is on it."""
        if record.draining and not record.attempts:
            self._books.instances.remove(record.spec.instance)
            out.append(ReleaseInstance(record.spec.instance, why))

    def lost(self, event: events.InstanceLost, out: Out) -> None:
        """The process or its connection is gone."""
        record = self._books.instances.records.get(event.instance)
        if record is not None:
            self.gone(record, event.error, event.now_s, out)

    def gone(self, record: InstanceRecord, why: str, now_s: float, out: Out) -> None:
        """Strike it from the books and go on elsewhere with its turns, oldest first."""
        books = self._books
        books.instances.remove(record.spec.instance)
        self._unbind(record, now_s, out)
        for turn in list(record.attempts.values()):
            books.dispatcher.attempts.pop(turn.attempt or 0)
            turn.attempt = turn.instance = None
            turn.device_s += record.clock.read(now_s, -1) - turn.device_clock_s
            turn.moves += 1
            turn.barren_losses += len(turn.tokens) == turn.base_tokens
        for turn in list(record.attempts.values()):
            if turn.barren_losses > books.settings.barren_losses:
                error = f"lost {turn.barren_losses} instances in a row without a token: {why}"
                books.fail(turn, error, now_s, out)
            else:
                books.resume(turn, now_s, out)

    def _unbind(self, record: InstanceRecord, now_s: float, out: Out) -> None:
        for turn in self._books.dispatcher.line.bound_to(record.spec.instance):
            self._books.dispatcher.line.remove(turn)
            self._books.dispatcher.place(turn, now_s, out)

    def budget_changed(self, event: events.BudgetChanged, out: Out) -> None:
        """A serving node lends another amount: what no longer fits moves, youngest first."""
        record = self._heard(event, out)
        if record is None:
            return
        load = record.load
        load.max_running, load.kv_tokens = max(event.max_running, 0), max(event.kv_tokens, 0)
        for turn in reversed(list(record.attempts.values())):
            fits = load.in_flight <= load.max_running and load.kv_load_tokens <= load.kv_tokens
            if fits:
                break
            self._books.dispatcher.recall(turn, out)
            self._books.resume(turn, event.now_s, out)
        self._books.room_changed(record, event.now_s, out)

    def fault(self, record: InstanceRecord, what: str, now_s: float, out: Out) -> None:
        """Count a lie or a failure; release the instance when there were too many."""
        record.faults += 1
        instance = record.spec.instance
        self._books.report(instance, what, out)
        released = instance not in self._books.instances.records
        if record.faults > self._books.settings.faults_allowed and not released:
            self.gone(record, f"released after {record.faults} faults", now_s, out)
            out.append(ReleaseInstance(instance, f"{record.faults} faults, the last: {what}"))

    def watch(self, now_s: float, out: Out) -> None:
        """Leases, stalls, notices that have run out, drained instances, pulls still wanted."""
        settings = self._books.settings
        for record in list(self._books.instances):
            borrowed = record.spec.kind is InstanceKind.BORROWED
            patience_s = settings.borrowed_stall_s if borrowed else settings.stall_s
            if now_s - record.heard_s > settings.lease_s:
                why = f"not heard for {now_s - record.heard_s:.1f} s"
                self._books.report(record.spec.instance, why, out)
                self.gone(record, why, now_s, out)
                out.append(ReleaseInstance(record.spec.instance, why))
            elif record.attempts and now_s - record.progress_s > patience_s and not record.stalled:
                why = f"no token for {now_s - record.progress_s:.1f} s"
                self._stall(record, why, now_s, out)
                if not borrowed:
                    self.fault(record, why, now_s, out)
            else:
                self.release_if_empty(record, "drained", out)
        for _, turn in self._books.dispatcher.line.heads():
            if self._books.instances.gates.takes(turn):
                self._books.demand.waits(turn, now_s, out)

    def _stall(self, record: InstanceRecord, why: str, now_s: float, out: Out) -> None:
        """Give it nothing until it is heard to go on, and move what it has."""
        record.stalled = True
        record.refresh()
        self._books.instances.changed()
        self._books.report(record.spec.instance, why, out)
        self._unbind(record, now_s, out)
        self.evacuate(record, now_s, out)

    def _heard(self, event: events.SignOfLife, out: Out) -> InstanceRecord | None:
        """The record, with its lease renewed; one that is not in the books is told to go."""
        record = self._books.instances.records.get(event.instance)
        if record is None:
            out.append(ReleaseInstance(event.instance, "it is not known here: join again"))
            return None
        record.heard_s = event.now_s
        return record
