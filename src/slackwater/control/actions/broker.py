"""The action broker: grants external resources one action at a time (ARL-Tangram).

Invariants: no core, GPU, limit or MiB is granted twice; every submitted action ends in exactly one
outcome; what an attempt holds is free again only when its worker reports that its processes are
gone, or the worker is lost; no action starves.
"""

from collections.abc import Sequence
from typing import assert_never

from slackwater.control.actions import commands, events
from slackwater.control.actions.broker_state import BrokerSettings, BrokerState
from slackwater.control.actions.lanes import CoreLane, LimitLane
from slackwater.control.actions.limit_usage import LimitUsage
from slackwater.control.actions.live import EnvironmentState, LiveAction
from slackwater.control.actions.sandbox_registry import SandboxRegistry
from slackwater.control.actions.starting import Starter
from slackwater.control.timer import TimerFired
from slackwater.model.action import ActionSpec, EnvironmentSpec, Limit, OutcomeKind
from slackwater.model.amounts import CORES, GPUS, MEMORY_MIB
from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import ActionId, EnvironmentId, ResourceName, TenantId
from slackwater.model.tenant_limits import check_action
from slackwater.policy.actions.curve import make_curve

_WORKER_RESOURCES = (CORES, GPUS, MEMORY_MIB)


class ActionBroker:
    """A state machine without I/O over all external resources."""

    def __init__(self, settings: BrokerSettings | None = None) -> None:
        self.state = BrokerState(settings or BrokerSettings())
        self._sandboxes = SandboxRegistry(self.state)
        self._starter = Starter(self.state)

    def handle(self, event: events.Event) -> Sequence[commands.Command]:
        """Take one event; return what the runtime must do about it, in order."""
        state = self.state
        state.out = []
        state.now_s = event.now_s
        match event:
            case events.ActionSubmitted(now_s, spec):
                self._submit(spec, now_s, started=False)
            case events.ActionAdopted(_, spec, submitted_s, started):
                self._submit(spec, submitted_s, started=started)
            case events.ActionFinished():
                self._finish(event)
            case events.ActionCancelled(_, action, reason):
                self._stop(action, OutcomeKind.CANCELLED, reason)
            case events.LimitDeclared(_, limit):
                self._declare_limit(limit)
            case events.ServiceDeclared(_, service):
                state.gpus.services[service.service] = service
                state.touch(state.gpus.name)
                self._sandboxes.refuse_impossible()
            case TimerFired():
                for what in state.pop_due(event.now_s):
                    self._handle_alarm(*what.split(":", 1))
            case _:
                self._handle_sandbox_event(event)
        self._start_all()
        state.set_timer(fired=isinstance(event, TimerFired))
        return state.out

    def _handle_sandbox_event(self, event: events.SandboxEvent) -> None:
        match event:
            case events.EnvironmentRequested(now_s, spec):
                self._sandboxes.add_environment(spec, now_s, EnvironmentState.WAITING)
            case events.EnvironmentAdopted(now_s, spec):
                self._sandboxes.add_environment(spec, now_s, EnvironmentState.AWAY)
            case events.EnvironmentOpened(_, name):
                self._sandboxes.confirm_open(name)
            case events.EnvironmentLost(_, name, reason):
                self._sandboxes.lose_environment(name, reason)
            case events.EnvironmentClosed(_, name):
                self._sandboxes.close_environment(name)
            case events.WorkerJoined():
                self._sandboxes.add_worker(event)
            case events.WorkerLost(_, node, reason):
                self._sandboxes.remove_worker(node, reason)
            case _:
                assert_never(event)

    # ---- queries ----
    def check_room(self, tenant: TenantId) -> None:
        """Raise if the queue is full, for everyone or for this tenant."""
        why = self._full_queue_reason(tenant)
        if why is not None:
            raise UnavailableError(why)

    def could_start(self, spec: ActionSpec) -> bool:
        """An estimate whether the action would start at once: its tenant has no waiting action, and
        the least cores that it needs are free for this tenant. Waiting actions of other tenants do
        not count: they wait for resources outside this tenant's share.
        """
        state, cores = self.state, spec.need(CORES)
        owner = state.tenant(spec.tenant)
        if owner.waiting or cores is None:
            return False
        lanes = list(state.nodes.values())
        if spec.environment is not None:
            place = state.environments.get(spec.environment)
            if place is None or not place.ready or place.queue or place.node is None:
                return False
            lanes = [state.nodes[place.node]]
        least = cores.amounts.least
        return any(min(lane.free, lane.remaining_for(owner)) >= least for lane in lanes)

    def check_environment(self, spec: EnvironmentSpec) -> None:
        """Raise if the tenant's limits exclude the environment, whatever is free."""
        self.state.tenant(spec.tenant).check_environment(spec)

    def _full_queue_reason(self, tenant: TenantId) -> str | None:
        settings = self.state.settings
        if self.state.waiting >= settings.max_waiting:
            return f"the queue is full: {self.state.waiting} actions are waiting; try again later"
        return self.state.tenant(tenant).full_queue_reason()

    # ---- actions ----
    def _submit(self, spec: ActionSpec, submitted_s: float, *, started: bool) -> None:
        state = self.state
        if spec.action in state.actions:
            return
        state.counters.submitted += 1
        action = self._make_live_action(spec, submitted_s)
        full_queue_reason = None if started else self._full_queue_reason(spec.tenant)
        state.actions[spec.action] = action
        state.count_waiting(action, 1)
        why = full_queue_reason or self._refusal(spec)
        if spec.environment is not None:
            action.environment = state.environments.get(spec.environment)
        if started and (why is not None or spec.retries == 0):
            action.environment = None
            state.end(action, OutcomeKind.LOST, "it was running when the broker stopped")
            return
        if why is None and spec.environment is not None and action.environment is None:
            why = f"environment {spec.environment} is not open"
        if why is not None:
            action.environment = None
            state.end(action, OutcomeKind.REFUSED, why)
            return
        action.retries_left -= started
        if spec.deadline_s is not None:
            state.set_alarm(submitted_s + spec.deadline_s, f"deadline:{spec.action}")
        if action.environment is not None:
            action.environment.queue.append(action)
            state.wake(action.environment)
        elif spec.need(CORES) or spec.need(GPUS):
            self._sandboxes.find_node(action)
        else:
            lane = f"limit:{action.limits[0][0]}"
            state.enqueue(action, state.lanes[lane])

    def _make_live_action(self, spec: ActionSpec, submitted_s: float) -> LiveAction:
        state = self.state
        key = spec.need(CORES) or spec.need(GPUS) or spec.needs[0]
        known_s = spec.single_unit_s
        if known_s is None:
            known_s = state.durations.mean_s(spec.kind)
        elastic = spec.elastic
        efficiency = elastic.efficiency if elastic and elastic.resource == key.resource else None
        guess_s = state.durations.guess_s(spec.kind)
        curve = make_curve(key.amounts, efficiency, known_s, guess_s)
        limits = tuple(
            (need.resource, need.amounts.least)
            for need in spec.needs
            if need.resource not in _WORKER_RESOURCES
        )
        memory = spec.need(MEMORY_MIB)
        rank = state.settings.order.rank(submitted_s, spec.priority, curve.least_s)
        return LiveAction(
            spec,
            state.number(),
            rank,
            submitted_s,
            spec.retries,
            curve,
            limits,
            memory.amounts.least if memory else 0,
            state.tenant(spec.tenant),
        )

    def _refusal(self, spec: ActionSpec) -> str | None:
        """Why it can never run, as far as can be told without a node."""
        try:
            check_action(spec, self.state.tenant(spec.tenant).limits)
        except ConfigError as error:
            return str(error)
        for need in spec.needs:
            if need.resource in _WORKER_RESOURCES:
                continue
            usage = self.state.limits.get(need.resource)
            if usage is None:
                known = sorted(self.state.limits)
                return f"resource {need.resource} is not declared; there are {known}"
            if not usage.ever_fits(need.amounts.least):
                return f"it needs {need.amounts.least} of {need.resource}, more than its limit"
        if {need.resource for need in spec.needs} == {MEMORY_MIB}:
            return "it needs memory and no cores"
        gpus = spec.need(GPUS)
        if gpus is not None and not set(gpus.amounts.choices) <= {1, 2, 4, 8}:
            return f"gpus: {gpus.amounts.choices} must be of 1, 2, 4 and 8"
        return None

    def _finish(self, event: events.ActionFinished) -> None:
        state = self.state
        attempt = state.attempts.get(event.attempt)
        if attempt is None or attempt.action.spec.action != event.action:
            return  # the attempt was given up when its worker was lost
        action, environment = attempt.action, attempt.action.environment
        if event.ended is OutcomeKind.DONE:
            spec = action.spec
            faster = spec.elastic.efficiency.speedup(attempt.units) if spec.elastic else 1.0
            state.durations.observe(spec.kind, event.ran_s * faster)
        if not attempt.outcome_reported:
            kind, reason = event.ended, event.reason
            if attempt.stopping is not None and kind is not OutcomeKind.DONE:
                kind, reason = attempt.stopping, attempt.stop_reason
            state.end(action, kind, reason, event.ran_s)
        state.release(attempt)
        if environment is not None and environment.busy is attempt:
            environment.busy = None
            state.wake(environment)

    def _stop(self, name: ActionId, kind: OutcomeKind, reason: str) -> None:
        """End a waiting action at once; stop a running one, which ends with its worker's report."""
        state = self.state
        action = state.actions.get(name)
        if action is None:
            return
        attempt = action.attempt
        if attempt is None:
            state.end(action, kind, reason)
        elif attempt.stopping is None:
            attempt.stopping, attempt.stop_reason = kind, reason
            state.out.append(commands.StopAction(attempt.grant.node, name, attempt.number, reason))
            state.set_alarm(state.now_s + state.settings.stop_grace_s, f"stopped:{attempt.number}")

    def _handle_alarm(self, kind: str, name: str) -> None:
        state = self.state
        match kind:
            case "deadline":
                self._stop(ActionId(name), OutcomeKind.TIMED_OUT, "its deadline passed")
            case "late" | "stopped":
                attempt = state.attempts.get(int(name))
                if attempt is None or attempt.outcome_reported:
                    return
                if kind == "late":
                    why = f"it ran longer than {attempt.action.spec.limit_s:g} s"
                    self._stop(attempt.action.spec.action, OutcomeKind.TIMED_OUT, why)
                elif attempt.stopping is not None:
                    state.end(attempt.action, attempt.stopping, attempt.stop_reason)
            case "limit":
                state.touch_waiters(ResourceName(name))
            case "away":
                self._sandboxes.expire_absent(EnvironmentId(name))

    # ---- limits ----
    def _declare_limit(self, limit: Limit) -> None:
        state = self.state
        if limit.resource in _WORKER_RESOURCES:
            return
        usage = state.limits.get(limit.resource)
        if usage is None:
            state.limits[limit.resource] = LimitUsage(limit)
            lane = LimitLane(limit.resource)
            state.lanes[lane.name] = lane
            return
        usage.limit = limit  # units already used keep their former window
        for action in list(state.actions.values()):
            if action.attempt is None and (why := self._refusal(action.spec)) is not None:
                state.end(action, OutcomeKind.REFUSED, why)
        state.touch_waiters(limit.resource)

    # ---- starting ----
    def _start_all(self) -> None:
        self.state.advance_woken()
        while (lane := self.state.next_touched()) is not None:
            if isinstance(lane, CoreLane):
                self._sandboxes.steal(lane)
            self._starter.run(lane)
            self.state.advance_woken()
