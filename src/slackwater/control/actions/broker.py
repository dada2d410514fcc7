"""The action broker: grants external resources one action at a time (ARL-Tangram).

Invariants: no core, GPU, limit or MiB is held by more than there is; an action that was submitted
ends in exactly one outcome; what an attempt holds is free again only when its worker says that all
of it is gone, or the worker is lost; no one is overtaken for ever.
"""

from collections.abc import Sequence
from typing import assert_never

from slackwater.control.actions import commands as do
from slackwater.control.actions import events as on
from slackwater.control.actions.broker_state import BrokerState
from slackwater.control.actions.integrity import check_books
from slackwater.control.actions.lanes import CoreLane, LimitLane
from slackwater.control.actions.limits import LimitBook
from slackwater.control.actions.live import Attempt, EnvironmentState, LiveAction
from slackwater.control.actions.sandbox_registry import SandboxRegistry
from slackwater.control.actions.settings import BrokerSettings
from slackwater.control.actions.starting import Starter
from slackwater.control.timer import TimerFired
from slackwater.model.action import ActionSpec, EnvironmentSpec, Limit, OutcomeKind
from slackwater.model.amounts import CORES, GPUS, MEMORY_MIB, Need
from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import ActionId, EnvironmentId, ResourceName, TenantId
from slackwater.model.tenant_limits import check_action, check_environment
from slackwater.policy.actions.curve import curve_of

_OF_WORKERS = (CORES, GPUS, MEMORY_MIB)


class ActionBroker:
    """A state machine without I/O over all external resources."""

    def __init__(self, settings: BrokerSettings | None = None) -> None:
        self.books = BrokerState(settings or BrokerSettings())
        self._places = SandboxRegistry(self.books)
        self._starter = Starter(self.books)

    def handle(self, event: on.Event) -> Sequence[do.Command]:
        """Take one event, return what the body must do about it, in order."""
        books = self.books
        books.out = []
        books.now_s = event.now_s
        match event:
            case on.ActionSubmitted(now_s, spec):
                self._submitted(spec, now_s, started=False)
            case on.ActionAdopted(_, spec, submitted_s, started):
                self._submitted(spec, submitted_s, started=started)
            case on.ActionFinished():
                self._finished(event)
            case on.ActionCancelled(_, action, reason):
                self._stop(action, OutcomeKind.CANCELLED, reason)
            case on.LimitDeclared(_, limit):
                self._declare(limit)
            case on.ServiceDeclared(_, service):
                books.gpus.pool.services[service.service] = service
                books.touch(books.gpus.name)
                self._places.refuse_impossible()
            case TimerFired():
                for what in books.due(event.now_s):
                    self._alarm(*what.split(":", 1))
            case _:
                self._place_event(event)
        self._start_all()
        books.set_timer(fired=isinstance(event, TimerFired))
        return books.out

    def _place_event(self, event: on.PlaceEvent) -> None:
        match event:
            case on.EnvironmentAsked(now_s, spec):
                self._places.asked(spec, now_s, EnvironmentState.WAITING)
            case on.EnvironmentAdopted(now_s, spec):
                self._places.asked(spec, now_s, EnvironmentState.AWAY)
            case on.EnvironmentOpened(_, name):
                self._places.opened(name)
            case on.EnvironmentLost(_, name, reason):
                self._places.died(name, reason)
            case on.EnvironmentClosed(_, name):
                self._places.closed(name)
            case on.WorkerJoined():
                self._places.joined(event)
            case on.WorkerLost(_, node, reason):
                self._places.lost(node, reason)
            case _:
                assert_never(event)

    # ---- questions the body may ask ----
    def check_room(self, tenant: TenantId) -> None:
        """Raise if the queue is full, for everyone or for this tenant."""
        why = self._no_room(tenant)
        if why is not None:
            raise UnavailableError(why)

    def could_start(self, spec: ActionSpec) -> bool:
        """A guess whether it would start at once: none of its tenant's waits, and the least cores
        are free that its tenant may have. Others that wait do so for what is theirs to hold.
        """
        books, cores = self.books, spec.need(CORES)
        owner = books.tenant(spec.tenant)
        if owner.waiting or cores is None:
            return False
        lanes = list(books.nodes.values())
        if spec.environment is not None:
            place = books.environments.get(spec.environment)
            if place is None or not place.ready or place.line or place.node is None:
                return False
            lanes = [books.nodes[place.node]]
        least = cores.amounts.least
        return any(min(lane.free, lane.left_for(owner)) >= least for lane in lanes)

    def check_environment(self, spec: EnvironmentSpec) -> None:
        """Raise if the tenant may not have it, whatever is free."""
        owner = self.books.tenant(spec.tenant)
        check_environment(spec, owner.limits)
        why = owner.no_environment()
        if why is not None:
            raise UnavailableError(why)

    def _no_room(self, tenant: TenantId) -> str | None:
        settings = self.books.settings
        if self.books.waiting >= settings.max_waiting:
            return f"the queue is full: {self.books.waiting} actions are waiting; try again later"
        return self.books.tenant(tenant).no_room()

    # ---- actions ----
    def _submitted(self, spec: ActionSpec, submitted_s: float, *, started: bool) -> None:
        books = self.books
        if spec.action in books.actions:
            return
        books.counters.submitted += 1
        action = self._live(spec, submitted_s)
        no_room = None if started else self._no_room(spec.tenant)
        books.actions[spec.action] = action
        books.count_waiting(action, 1)
        why = no_room or self._refusal(spec)
        if spec.environment is not None:
            action.environment = books.environments.get(spec.environment)
        if started and (why is not None or spec.retries == 0):
            action.environment = None
            books.end(action, OutcomeKind.LOST, "it was running when the broker stopped")
            return
        if why is None and spec.environment is not None and action.environment is None:
            why = f"environment {spec.environment} is not open"
        if why is not None:
            action.environment = None
            books.end(action, OutcomeKind.REFUSED, why)
            return
        action.tries_left -= started
        if spec.deadline_s is not None:
            books.alarm(submitted_s + spec.deadline_s, f"deadline:{spec.action}")
        if action.environment is not None:
            action.environment.line.append(action)
            books.stir(action.environment)
        elif spec.need(CORES) or spec.need(GPUS):
            self._places.find_node(action)
        else:
            lane = f"limit:{action.limits[0][0]}"
            books.enter(action, books.lanes[lane])

    def _live(self, spec: ActionSpec, submitted_s: float) -> LiveAction:
        books = self.books
        key = spec.need(CORES) or spec.need(GPUS) or spec.needs[0]
        known_s = spec.single_unit_s
        if known_s is None:
            known_s = books.durations.mean_s(spec.kind)
        elastic = spec.elastic
        efficiency = elastic.efficiency if elastic and elastic.resource == key.resource else None
        guess_s = books.durations.guess_s(spec.kind)
        curve = curve_of(key.amounts, efficiency, known_s, guess_s)
        limits = tuple(
            (need.resource, need.amounts.least)
            for need in spec.needs
            if need.resource not in _OF_WORKERS
        )
        memory = spec.need(MEMORY_MIB)
        rank = books.settings.order.rank(submitted_s, spec.priority, curve.least_s)
        return LiveAction(
            spec,
            books.number(),
            rank,
            submitted_s,
            spec.retries,
            curve,
            limits,
            memory.amounts.least if memory else 0,
            books.tenant(spec.tenant),
        )

    def _refusal(self, spec: ActionSpec) -> str | None:
        """Why it can never run, as far as that is known without a node."""
        try:
            check_action(spec, self.books.tenant(spec.tenant).limits)
        except ConfigError as error:
            return str(error)
        for need in spec.needs:
            if need.resource in _OF_WORKERS:
                continue
            book = self.books.limits.get(need.resource)
            if book is None:
                known = sorted(self.books.limits)
                return f"resource {need.resource} is not declared; there are {known}"
            if not book.ever_fits(need.amounts.least):
                return f"it needs {need.amounts.least} of {need.resource}, more than its limit"
        if {need.resource for need in spec.needs} == {MEMORY_MIB}:
            return "it needs memory and no cores"
        return self._bad_degree(spec.need(GPUS))

    @staticmethod
    def _bad_degree(need: Need | None) -> str | None:
        if need is None or set(need.amounts.choices) <= {1, 2, 4, 8}:
            return None
        return f"gpus: {need.amounts.choices} must be of 1, 2, 4 and 8"

    def _finished(self, event: on.ActionFinished) -> None:
        books = self.books
        attempt = books.attempts.get(event.attempt)
        if attempt is None or attempt.action.spec.action != event.action:
            return  # about an attempt that was given up with its worker
        action, environment = attempt.action, attempt.action.environment
        if event.ended is OutcomeKind.DONE:
            self._learn(attempt, event.ran_s)
        if not attempt.told:
            kind, reason = event.ended, event.reason
            if attempt.stopping is not None and kind is not OutcomeKind.DONE:
                kind, reason = attempt.stopping, attempt.stop_reason
            books.end(action, kind, reason, event.ran_s)
        books.release(attempt)
        if environment is not None and environment.busy is attempt:
            environment.busy = None
            books.stir(environment)

    def _learn(self, attempt: Attempt, ran_s: float) -> None:
        spec = attempt.action.spec
        faster = spec.elastic.efficiency.speedup(attempt.units) if spec.elastic else 1.0
        self.books.durations.observe(spec.kind, ran_s * faster)

    def _stop(self, name: ActionId, kind: OutcomeKind, reason: str) -> None:
        """End it at once if it waits; if it runs, its outcome comes with its worker's report."""
        books = self.books
        action = books.actions.get(name)
        if action is None:
            return
        attempt = action.attempt
        if attempt is None:
            books.end(action, kind, reason)
        elif attempt.stopping is None:
            attempt.stopping, attempt.stop_reason = kind, reason
            books.out.append(do.StopAction(attempt.grant.node, name, attempt.number, reason))
            books.alarm(books.now_s + books.settings.stop_grace_s, f"stopped:{attempt.number}")

    def _alarm(self, kind: str, name: str) -> None:
        books = self.books
        match kind:
            case "deadline":
                self._stop(ActionId(name), OutcomeKind.TIMED_OUT, "its deadline passed")
            case "late":
                attempt = books.attempts.get(int(name))
                if attempt is not None and not attempt.told:
                    why = f"it ran longer than {attempt.action.spec.limit_s:g} s"
                    self._stop(attempt.action.spec.action, OutcomeKind.TIMED_OUT, why)
            case "stopped":
                attempt = books.attempts.get(int(name))
                if attempt is not None and not attempt.told and attempt.stopping is not None:
                    books.end(attempt.action, attempt.stopping, attempt.stop_reason)
            case "limit":
                books.touch_waiters(ResourceName(name))
            case "away":
                self._places.not_back(EnvironmentId(name))

    # ---- limits ----
    def _declare(self, limit: Limit) -> None:
        books = self.books
        if limit.resource in _OF_WORKERS:
            return
        book = books.limits.get(limit.resource)
        if book is None:
            books.limits[limit.resource] = LimitBook(limit)
            lane = LimitLane(limit.resource)
            books.lanes[lane.name] = lane
            return
        book.change(limit)
        for action in list(books.actions.values()):
            if action.attempt is None and (why := self._refusal(action.spec)) is not None:
                books.end(action, OutcomeKind.REFUSED, why)
        books.touch_waiters(limit.resource)

    # ---- starting ----
    def _start_all(self) -> None:
        self.books.advance_stirred()
        while (lane := self.books.next_touched()) is not None:
            if isinstance(lane, CoreLane):
                self._places.steal(lane)
            self._starter.run(lane)
            self.books.advance_stirred()

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        check_books(self.books)
