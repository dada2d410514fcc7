"""The broker's state, and what all its parts do: end an action, release an attempt."""

import heapq
import math

from slackwater.control.actions import commands as do
from slackwater.control.actions.lanes import CoreLane, GpuLane, Lane
from slackwater.control.actions.limits import LimitBook
from slackwater.control.actions.live import Attempt, BrokerCounters, LiveAction, LiveEnvironment
from slackwater.control.actions.settings import BrokerSettings
from slackwater.control.actions.tenants import TenantState
from slackwater.control.timer import SetTimer
from slackwater.model.action import Outcome, OutcomeKind
from slackwater.model.amounts import MEMORY_MIB
from slackwater.model.ids import ActionId, EnvironmentId, NodeId, ResourceName, TenantId
from slackwater.policy.actions.durations import DurationBook

CLOCK = "actions"


class BrokerState:
    """The state, and the commands of the event in hand."""

    def __init__(self, settings: BrokerSettings) -> None:
        self.settings = settings
        self.actions: dict[ActionId, LiveAction] = {}
        self.attempts: dict[int, Attempt] = {}
        self.environments: dict[EnvironmentId, LiveEnvironment] = {}
        self.tenants: dict[TenantId, TenantState] = {}
        self.homeless: dict[ActionId, LiveAction] = {}  # wait for a worker that could run them
        self.nodes: dict[NodeId, CoreLane] = {}
        self.gpus = GpuLane()
        self.lanes: dict[str, Lane] = {self.gpus.name: self.gpus}
        self.limits: dict[ResourceName, LimitBook] = {}
        self.durations = DurationBook(settings.guess_s)
        self.counters = BrokerCounters()
        self.out: list[do.Command] = []
        self.now_s = 0.0
        self.waiting = 0
        self._dirty: dict[str, None] = {}
        self._stirred: dict[EnvironmentId, LiveEnvironment] = {}
        self._alarms: list[tuple[float, int, str]] = []
        self._pending: dict[str, float] = {}
        self._set_for_s: float | None = None
        self._numbers = 0

    def number(self) -> int:
        """The next number: it identifies and orders actions, attempts and environments."""
        self._numbers += 1
        return self._numbers

    # ---- lanes to look at ----
    def touch(self, lane: str) -> None:
        """Something changed there: see at the end of this event who can start."""
        self._dirty[lane] = None

    def next_touched(self) -> Lane | None:
        while self._dirty:
            name = next(iter(self._dirty))
            del self._dirty[name]
            if name in self.lanes:
                return self.lanes[name]
        return None

    def touch_waiters(self, resource: ResourceName) -> None:
        """Whoever waits for this limit may go now."""
        for lane in self.limits[resource].blocked:
            self.touch(lane)

    # ---- time ----
    def alarm(self, at_s: float, what: str) -> None:
        """Come back at `at_s`: `what` says why."""
        heapq.heappush(self._alarms, (at_s, self.number(), what))

    def alarm_once(self, at_s: float, what: str) -> None:
        """The same, unless one for the same reason is set for no later."""
        if self._pending.get(what, math.inf) > at_s:
            self._pending[what] = at_s
            self.alarm(at_s, what)

    def due(self, now_s: float) -> list[str]:
        """What was to come back by now."""
        found: list[str] = []
        while self._alarms and self._alarms[0][0] <= now_s:
            at_s, _, what = heapq.heappop(self._alarms)
            if self._pending.get(what) == at_s:
                del self._pending[what]
            found.append(what)
        return found

    def set_timer(self, *, fired: bool) -> None:
        """One timer stands for all alarms; it is set again when the first of them changes."""
        if fired:
            self._set_for_s = None
        if self._alarms and (self._set_for_s is None or self._alarms[0][0] < self._set_for_s):
            self._set_for_s = self._alarms[0][0]
            self.out.append(SetTimer(CLOCK, self._set_for_s))

    # ---- changes ----
    def count_waiting(self, action: LiveAction, change: int) -> None:
        self.waiting += change
        action.owner.waiting += change

    def tenant(self, name: TenantId) -> TenantState:
        found = self.tenants.get(name)
        if found is None:
            found = TenantState(name, self.settings.tenants.of(name))
            self.tenants[name] = found
        return found

    @property
    def memory_mib(self) -> int:
        return sum(lane.capacity.memory_mib for lane in self.nodes.values())

    def unline(self, action: LiveAction) -> None:
        """Take a waiting action out of wherever it waits."""
        assert action.attempt is None
        self.homeless.pop(action.spec.action, None)
        if action.lane is not None:
            action.lane.remove(action)
            self.touch(action.lane.name)
            action.lane = None

    def end(self, action: LiveAction, kind: OutcomeKind, reason: str, ran_s: float = 0.0) -> None:
        """Its one outcome. A running attempt keeps what it holds until its worker reports."""
        attempt = action.attempt
        if attempt is None:
            self.unline(action)
            self.count_waiting(action, -1)
            queued_s, grant = self.now_s - action.submitted_s, None
        else:
            queued_s, grant = attempt.started_s - action.submitted_s, attempt.grant
            attempt.told = True
        del self.actions[action.spec.action]
        environment = action.environment
        if environment is not None:
            was_first = environment.line[0] is action
            environment.line.remove(action)
            # The next one may not start while a stopped one might still run in there.
            if was_first and attempt is None:
                self.stir(environment)
        self.counters.ended[kind] += 1
        outcome = Outcome(kind, reason, queued_s, ran_s, grant)
        self.out.append(do.EndAction(action.spec.action, outcome))

    def release(self, attempt: Attempt) -> None:
        """Its worker has reported, or is gone: everything that it held is free again."""
        del self.attempts[attempt.number]
        lane = self.lanes.get(attempt.lane)
        if lane is not None and lane.end(attempt, self.now_s):
            lane.give_back(attempt.action, attempt.grant, self.now_s)
            if attempt.short:
                lane.short.change(-attempt.units, self.now_s)
            self.touch(lane.name)
        attempt.action.owner.held_mib -= attempt.grant.amount(MEMORY_MIB)
        for resource, units in attempt.action.limits:
            self.limits[resource].give_back(units)
            self.touch_waiters(resource)
        attempt.action.attempt = None

    def stir(self, environment: LiveEnvironment) -> None:
        """See at the end of this event whether its next action can stand in line."""
        self._stirred[environment.spec.environment] = environment

    def advance_stirred(self) -> None:
        while self._stirred:
            name = next(iter(self._stirred))
            environment = self._stirred.pop(name)
            if self.environments.get(name) is environment:
                self._advance(environment)

    def _advance(self, environment: LiveEnvironment) -> None:
        """Let the first action of an open, quiet environment into its node's lane."""
        if not environment.ready or environment.busy is not None or not environment.line:
            return
        action = environment.line[0]
        if action.lane is None and action.attempt is None:
            assert environment.node is not None
            self.enter(action, self.nodes[environment.node])

    def enter(self, action: LiveAction, lane: Lane) -> None:
        """Stand in line; refused at once if it can never run there."""
        why = lane.refusal(action)
        if why is not None:
            self.end(action, OutcomeKind.REFUSED, why)
            return
        action.lane = lane
        lane.add(action)
        if action.curve.elastic:
            lane.elastic.arrived(action.curve.least_s * action.curve.least, self.now_s)
        self.touch(lane.name)
