"""The broker's state, and the changes that all its parts make, such as ending an action."""

import heapq
import math
from dataclasses import dataclass, field

from slackwater.control.actions import commands
from slackwater.control.actions.gpus import GpuLane
from slackwater.control.actions.lanes import CoreLane, Lane
from slackwater.control.actions.limit_usage import LimitUsage
from slackwater.control.actions.live import (
    Attempt,
    BrokerCounters,
    LiveAction,
    LiveEnvironment,
    TenantState,
)
from slackwater.control.timer import SetTimer
from slackwater.model.action import Outcome, OutcomeKind
from slackwater.model.amounts import MEMORY_MIB
from slackwater.model.errors import ConfigError, check_above_zero
from slackwater.model.ids import ActionId, EnvironmentId, NodeId, ResourceName, TenantId
from slackwater.model.tenant_limits import TenantTable
from slackwater.policy.actions.durations import DurationEstimator
from slackwater.policy.actions.priced import PricedScheduling
from slackwater.policy.actions.scheduling import ActionOrder, ArrivalOrder, Scheduling

CLOCK = "actions"


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """`max_waiting` and the tenants' limits bound the queue; actions beyond them are refused.

    If a stopped action has not ended after `stop_grace_s`, its owner is notified and its resources
    stay taken. Environments of the durable log must return with their worker within `return_s`.
    """

    scheduling: Scheduling = field(default_factory=PricedScheduling)
    order: ActionOrder = field(default_factory=ArrivalOrder)
    max_waiting: int = 100_000
    tenants: TenantTable = field(default_factory=TenantTable)
    stop_grace_s: float = 10.0
    limit_grace_s: float = 5.0
    return_s: float = 60.0
    guess_s: float = 1.0

    def __post_init__(self) -> None:
        if self.max_waiting < 1:
            raise ConfigError.of("max_waiting", self.max_waiting, "must be 1 or more")
        check_above_zero("", self, "stop_grace_s", "limit_grace_s", "return_s", "guess_s")


class BrokerState:
    """The state, and the commands that answer the current event."""

    def __init__(self, settings: BrokerSettings) -> None:
        self.settings = settings
        self.actions: dict[ActionId, LiveAction] = {}
        self.attempts: dict[int, Attempt] = {}
        self.environments: dict[EnvironmentId, LiveEnvironment] = {}
        self.tenants: dict[TenantId, TenantState] = {}
        self.unplaced: dict[ActionId, LiveAction] = {}  # wait for a first worker
        self.queued: dict[ActionId, Lane] = {}  # wait in these lanes
        self.nodes: dict[NodeId, CoreLane] = {}
        self.gpus = GpuLane()
        self.lanes: dict[str, Lane] = {self.gpus.name: self.gpus}
        self.limits: dict[ResourceName, LimitUsage] = {}
        self.durations = DurationEstimator(settings.guess_s)
        self.counters = BrokerCounters()
        self.out: list[commands.Command] = []
        self.now_s = 0.0
        self.waiting = 0
        self._touched: dict[str, None] = {}
        self._woken: dict[EnvironmentId, LiveEnvironment] = {}
        self._alarms: list[tuple[float, int, str]] = []
        self._pending: dict[str, float] = {}
        self._timer_s: float | None = None
        self._numbers = 0

    def number(self) -> int:
        """The next number: it identifies and orders actions, attempts and environments."""
        self._numbers += 1
        return self._numbers

    # ---- lanes to schedule ----
    def touch(self, lane: str) -> None:
        """Something changed in this lane: schedule it at the end of this event."""
        self._touched[lane] = None

    def next_touched(self) -> Lane | None:
        while self._touched:
            name = next(iter(self._touched))
            del self._touched[name]
            if name in self.lanes:
                return self.lanes[name]
        return None

    def touch_waiters(self, resource: ResourceName) -> None:
        """Schedule every lane whose first action waits for this limit."""
        for lane in self.limits[resource].first_claims:
            self.touch(lane)

    # ---- time ----
    def set_alarm(self, at_s: float, what: str) -> None:
        """Call `ActionBroker._handle_alarm` at `at_s`; `what` is KIND:NAME."""
        heapq.heappush(self._alarms, (at_s, self.number(), what))

    def set_alarm_once(self, at_s: float, what: str) -> None:
        """The same, unless an alarm with this `what` is already set for an earlier time."""
        if self._pending.get(what, math.inf) > at_s:
            self._pending[what] = at_s
            self.set_alarm(at_s, what)

    def pop_due(self, now_s: float) -> list[str]:
        """Remove and return the alarms that are due."""
        found: list[str] = []
        while self._alarms and self._alarms[0][0] <= now_s:
            at_s, _, what = heapq.heappop(self._alarms)
            if self._pending.get(what) == at_s:
                del self._pending[what]
            found.append(what)
        return found

    def set_timer(self, *, fired: bool) -> None:
        """Keep one timer for all alarms, set for the earliest of them."""
        if fired:
            self._timer_s = None
        if self._alarms and (self._timer_s is None or self._alarms[0][0] < self._timer_s):
            self._timer_s = self._alarms[0][0]
            self.out.append(SetTimer(CLOCK, self._timer_s))

    # ---- changes ----
    def count_waiting(self, action: LiveAction, change: int) -> None:
        self.waiting += change
        action.owner.waiting += change

    def tenant(self, name: TenantId) -> TenantState:
        found = self.tenants.get(name)
        if found is None:
            found = TenantState(name, self.settings.tenants.limits_of(name))
            self.tenants[name] = found
        return found

    @property
    def memory_mib(self) -> int:
        return sum(lane.capacity.memory_mib for lane in self.nodes.values())

    def dequeue(self, action: LiveAction) -> None:
        """Take a waiting action out of the queue it waits in."""
        assert action.attempt is None
        self.unplaced.pop(action.spec.action, None)
        lane = self.queued.pop(action.spec.action, None)
        if lane is not None:
            lane.remove(action)
            self.touch(lane.name)

    def end(self, action: LiveAction, kind: OutcomeKind, reason: str, ran_s: float = 0.0) -> None:
        """Give an action its one outcome. An attempt keeps its grant until its worker reports."""
        attempt = action.attempt
        if attempt is None:
            self.dequeue(action)
            self.count_waiting(action, -1)
            queued_s, grant = self.now_s - action.submitted_s, None
        else:
            queued_s, grant = attempt.started_s - action.submitted_s, attempt.grant
            attempt.outcome_reported = True
        del self.actions[action.spec.action]
        environment = action.environment
        if environment is not None:
            was_first = environment.queue[0] is action
            environment.queue.remove(action)
            # The next action may not start while a stopped one may still run in the environment.
            if was_first and attempt is None:
                self.wake(environment)
        self.counters.ended[kind] += 1
        outcome = Outcome(kind, reason, queued_s, ran_s, grant)
        self.out.append(commands.EndAction(action.spec.action, outcome))

    def release(self, attempt: Attempt) -> None:
        """Free what an attempt held: its worker has reported its end, or is lost."""
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

    def wake(self, environment: LiveEnvironment) -> None:
        """At the end of this event, queue the environment's next action if it is idle."""
        self._woken[environment.spec.environment] = environment

    def advance_woken(self) -> None:
        while self._woken:
            name = next(iter(self._woken))
            environment = self._woken.pop(name)
            if self.environments.get(name) is environment:
                self._advance(environment)

    def _advance(self, environment: LiveEnvironment) -> None:
        """Queue the first action of an open, idle environment in its node's lane."""
        if not environment.ready or environment.busy is not None or not environment.queue:
            return
        action = environment.queue[0]
        if action.spec.action not in self.queued and action.attempt is None:
            assert environment.node is not None
            self.enqueue(action, self.nodes[environment.node])

    def enqueue(self, action: LiveAction, lane: Lane) -> None:
        """Queue an action in a lane; refuse it at once if it can never run there."""
        why = lane.refusal(action)
        if why is not None:
            self.end(action, OutcomeKind.REFUSED, why)
            return
        self.queued[action.spec.action] = lane
        lane.add(action)
        if action.curve.elastic:
            lane.elastic.record_arrival(action.curve.least_s * action.curve.least, self.now_s)
        self.touch(lane.name)
