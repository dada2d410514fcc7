"""Instances that join, serve, drain and leave; leases, stalls and faults."""

from slackwater.control.rollout import events
from slackwater.control.rollout.commands import ReleaseInstance
from slackwater.control.rollout.dispatcher import Dispatcher
from slackwater.control.rollout.instances import InstanceRecord
from slackwater.control.rollout.manager_state import ManagerState
from slackwater.control.weights.events import VersionFreed
from slackwater.model.instance import InstanceKind


class Membership:
    """Handles the events of instances."""

    def __init__(self, state: ManagerState, dispatcher: Dispatcher) -> None:
        self._state = state
        self._dispatcher = dispatcher
        self._borrowed_slowness = 1.0  # of the borrowed engine that was measured last

    def add_instance(self, event: events.InstanceJoined) -> None:
        """Add an instance. It runs turns once a version is offered there."""
        state, spec = self._state, event.spec
        if spec.instance in state.instances.records:
            self.remove_instance(state.instances.records[spec.instance], "joined again")
        record = InstanceRecord(spec, event.now_s)
        if spec.kind is InstanceKind.BORROWED:
            record.load.slowness = self._borrowed_slowness
        state.instances.add(record)

    def add_version(self, event: events.VersionOffered) -> None:
        """Turns may run with the version on the instance from now on."""
        record = self._renew_lease(event)
        if record is None:
            return
        record.recalled.discard(event.version)
        record.versions.add(event.version)
        record.progress_s = event.now_s
        self._dispatcher.room_changed(record)

    def recall_version(self, event: events.VersionRecalled) -> None:
        """Start no more turns with the version there; `report_freed_versions` follows the last."""
        record = self._state.instances.records.get(event.instance)
        if record is None or event.version not in record.versions:
            return
        record.versions.discard(event.version)
        record.recalled.add(event.version)
        self._state.instances.recalling.add(event.instance)
        record.refresh()
        self._state.instances.invalidate()
        self._unbind(record)

    def report_freed_versions(self) -> None:
        """After every event: report recalled versions that no attempt uses any more."""
        fleet = self._state.instances
        for instance in sorted(fleet.recalling):
            record = fleet.records[instance]
            for version in record.find_unused_recalled():
                record.recalled.discard(version)
                self._state.out.append(VersionFreed(self._state.now_s, instance, version))
            if not record.recalled:
                fleet.recalling.discard(instance)

    def record_fault(self, event: events.InstanceFaulted) -> None:
        """The weight director reported a fault of the instance."""
        record = self._renew_lease(event)
        if record is not None:
            self.fault(record, event.what)

    def record_heartbeat(self, event: events.InstanceHeartbeat) -> None:
        """Renew the lease and update the load."""
        record = self._renew_lease(event)
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
            self._stall(record, "it reported a stall")
        elif record.stalled and not event.stalled:
            record.stalled = False
            self._dispatcher.room_changed(record)
        else:
            self._dispatcher.fill(record)

    def _learn_rate(self, record: InstanceRecord, event: events.InstanceHeartbeat) -> None:
        """Learn from the progress since the last report.

        Two reports with about the same batch and no prefill between them give the decode rate;
        pairs of reports between which the instance was busy fit the time of a step.
        """
        since_s = event.now_s - record.reported_s if record.reported_s is not None else 0.0
        made = event.produced_tokens - record.produced_tokens
        if since_s <= 0 or made <= 0:
            record.load.produced_per_s = 0.0
            return
        record.load.produced_per_s = made / since_s
        steady = abs(event.running - record.reported_running) <= max(1, event.running // 8)
        if steady and event.prefilled_tokens == record.prefilled_tokens:
            self._state.profile.observe(event.running, made / since_s)
        fewer, more = sorted((event.running, record.reported_running))
        if 0 < more <= 2 * fewer:
            batch = (fewer + more) / 2
            steps = made / batch
            context = (event.kv_used_tokens + record.reported_kv_tokens) / 2
            prefilled = max(event.prefilled_tokens - record.prefilled_tokens, 0)
            step_s, beside = since_s / steps, prefilled / steps
            law = self._state.step_time.model
            if law is not None:
                record.slowness.observe(step_s, law.step_s(batch, context, beside))
                record.load.slowness = record.slowness.factor
            slowness = record.load.slowness
            # A borrowed engine's steps wait for its service's: they must not enter the fit.
            if record.spec.kind is InstanceKind.BORROWED and law is not None:
                self._borrowed_slowness = slowness
            else:
                self._state.step_time.observe(batch, context, step_s, beside, slowness)

    def handle_notice(self, event: events.InstanceNotice) -> None:
        """The instance will be removed: move its turns while it still lives."""
        record = self._renew_lease(event)
        if record is not None:
            record.leaves_at_s = event.leaves_at_s
            self.hand_over(record, "notice of removal")

    def drain(self, event: events.DrainRequested) -> None:
        """Drain the instance for an operator."""
        record = self._state.instances.records.get(event.instance)
        if record is not None:
            self._drain(record)
            if event.move_turns:
                self.evacuate(record)
            self.release_if_empty(record, "drained")

    def hand_over(self, record: InstanceRecord, why: str) -> None:
        """Move all turns off the instance and release it now."""
        self._drain(record)
        self.evacuate(record)
        self.release_if_empty(record, why)

    def _drain(self, record: InstanceRecord) -> None:
        record.draining = True
        record.refresh()
        self._state.instances.invalidate()
        self._unbind(record)

    def evacuate(self, record: InstanceRecord) -> None:
        """Move all turns off a live instance that accepts no more."""
        for turn in list(record.attempts.values()):
            self._dispatcher.recall(turn)
            self._dispatcher.resume(turn)

    def release_if_empty(self, record: InstanceRecord, why: str) -> None:
        """Release a draining instance once it runs no turn."""
        if record.draining and not record.attempts:
            self._state.instances.remove(record.spec.instance)
            self._state.out.append(ReleaseInstance(record.spec.instance, why))

    def lose_instance(self, event: events.InstanceLost) -> None:
        """The instance's process or connection is lost."""
        record = self._state.instances.records.get(event.instance)
        if record is not None:
            self.remove_instance(record, event.error)

    def remove_instance(self, record: InstanceRecord, why: str) -> None:
        """Remove an instance and dispatch its turns elsewhere, oldest first."""
        state = self._state
        state.instances.remove(record.spec.instance)
        self._unbind(record)
        record.frames.clear()
        for turn in list(record.attempts.values()):
            self._dispatcher.attempts.pop(turn.attempt or 0)
            turn.attempt = turn.instance = None
            turn.device_s += record.clock.read(state.now_s, -1) - turn.device_clock_s
            turn.moves += 1
            turn.losses_without_progress += len(turn.tokens) == turn.base_tokens
        for turn in list(record.attempts.values()):
            if turn.losses_without_progress > state.settings.max_losses_without_progress:
                error = (
                    f"lost {turn.losses_without_progress} instances in a row without a token: {why}"
                )
                self._dispatcher.fail(turn, error)
            else:
                self._dispatcher.resume(turn)

    def _unbind(self, record: InstanceRecord) -> None:
        for turn in self._dispatcher.queue.turns_bound_to(record.spec.instance):
            self._dispatcher.queue.remove(turn)
            self._dispatcher.place(turn)

    def change_budget(self, event: events.BudgetChanged) -> None:
        """A serving node lends another amount: turns that no longer fit move, youngest first."""
        record = self._renew_lease(event)
        if record is None:
            return
        load = record.load
        load.max_running, load.kv_tokens = max(event.max_running, 0), max(event.kv_tokens, 0)
        for turn in reversed(list(record.attempts.values())):
            fits = load.in_flight <= load.max_running and load.kv_load_tokens <= load.kv_tokens
            if fits:
                break
            self._dispatcher.recall(turn)
            self._dispatcher.resume(turn)
        self._dispatcher.room_changed(record)

    def fault(self, record: InstanceRecord, what: str) -> None:
        """Count a fault; release the instance after too many."""
        record.faults += 1
        instance = record.spec.instance
        self._state.report(instance, what)
        released = instance not in self._state.instances.records
        if record.faults > self._state.settings.faults_allowed and not released:
            self.remove_instance(record, f"released after {record.faults} faults")
            self._state.out.append(
                ReleaseInstance(instance, f"{record.faults} faults, the last: {what}")
            )

    def watch(self) -> None:
        """Check leases, stalls and drained instances, and report versions that turns wait for."""
        settings, now_s = self._state.settings, self._state.now_s
        for record in list(self._state.instances):
            borrowed = record.spec.kind is InstanceKind.BORROWED
            patience_s = settings.borrowed_stall_s if borrowed else settings.stall_s
            if now_s - record.heard_s > settings.lease_s:
                why = f"silent for {now_s - record.heard_s:.1f} s"
                self._state.report(record.spec.instance, why)
                self.remove_instance(record, why)
                self._state.out.append(ReleaseInstance(record.spec.instance, why))
            elif record.attempts and now_s - record.progress_s > patience_s and not record.stalled:
                why = f"no token for {now_s - record.progress_s:.1f} s"
                self._stall(record, why)
                if not borrowed:
                    self.fault(record, why)
            else:
                self.release_if_empty(record, "drained")
        for _, turn in self._dispatcher.queue.heads():
            if self._state.instances.gates.takes(turn):
                self._dispatcher.demand.report_waiting(turn)

    def _stall(self, record: InstanceRecord, why: str) -> None:
        """Move the instance's turns away, and give it none until it makes progress again."""
        record.stalled = True
        record.refresh()
        self._state.instances.invalidate()
        self._state.report(record.spec.instance, why)
        self._unbind(record)
        self.evacuate(record)

    def _renew_lease(self, event: events.LivenessEvent) -> InstanceRecord | None:
        """Renew an instance's lease and return its record; release an unknown one."""
        record = self._state.instances.records.get(event.instance)
        if record is None:
            self._state.out.append(ReleaseInstance(event.instance, "unknown instance: join again"))
            return None
        record.heard_s = event.now_s
        return record
