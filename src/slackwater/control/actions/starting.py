"""Starts the first actions of a lane that fit, with the policy's units (ARL-Tangram 4.2).

An action that waits for cores or GPUs blocks them for all behind it, so none starves. One that
waits for a limit lets others pass, but blocks that limit for later actions in every lane.
"""

import numpy as np
from numpy.typing import NDArray

from slackwater.control.actions import commands
from slackwater.control.actions.broker_state import BrokerState
from slackwater.control.actions.fair_queue import FairOrder
from slackwater.control.actions.gpus import GpuLane
from slackwater.control.actions.lanes import Lane, LimitLane
from slackwater.control.actions.limit_usage import LimitClaim
from slackwater.control.actions.live import Attempt, LiveAction
from slackwater.model.action import Grant
from slackwater.model.amounts import MEMORY_MIB
from slackwater.model.ids import ResourceName, TenantId
from slackwater.policy.actions.curve import DurationCurve, limit_choices, make_curve
from slackwater.policy.actions.scheduling import SchedulingView

_MOST_SKIPPED = 32
_MOST_SEEN = 256
_MOST_ELASTIC = 64
_MOST_BEHIND = 256


class _Headroom:
    """What a lane can still give beyond the units promised to candidates so far."""

    def __init__(self, lane: Lane, total_mib: int) -> None:
        self._lane = lane
        self._total_mib = total_mib
        self._promised: dict[TenantId, tuple[int, int]] = {}  # units and MiB
        self.no_memory: TenantId | None = None  # the tenant whose first action waits for memory
        self.free = lane.free
        self._promised_mib = 0
        self._chunks = lane.topology(0) if isinstance(lane, GpuLane) else None
        self._chunk_state = self._chunks.start if self._chunks else 0

    def admits(self, action: LiveAction, curve: DurationCurve) -> bool:
        """Whether its tenant's limits allow it; if not, other tenants may pass."""
        units, mib = self._promised.get(action.spec.tenant, (0, 0))
        if curve.choices and curve.least > self._lane.remaining_for(action.owner) - units:
            return False
        if not action.memory_mib:
            return True
        if self.no_memory not in (None, action.spec.tenant):
            return False
        owner = action.owner
        return owner.held_mib + mib + action.memory_mib <= owner.limits.memory_of(self._total_mib)

    def take(self, action: LiveAction, curve: DurationCurve) -> bool:
        """Promise an action its least units, if they are free."""
        if not curve.choices or curve.least > self.free:
            return False
        if action.memory_mib and not self._lane.has_memory(action, self._promised_mib):
            self.no_memory = action.spec.tenant
            return False
        if self._chunks is not None:
            self._chunk_state = int(self._chunks.after[self._chunk_state, curve.least])
            if self._chunk_state < 0:
                return False
        self.free -= curve.least
        self._promised_mib += action.memory_mib
        units, mib = self._promised.get(action.spec.tenant, (0, 0))
        self._promised[action.spec.tenant] = (units + curve.least, mib + action.memory_mib)
        return True


class Starter:
    """Starts the actions of one lane after another."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def run(self, lane: Lane) -> None:
        """Start what can start in one lane."""
        if not len(lane):
            self._set_claims(lane, {})
            return
        if lane.queue.shared:
            for attempt in lane.running.values():
                lane.queue.charge_running(attempt, self._state.now_s)
        order = lane.queue.iterate()
        candidates, seen, claims = self._candidates(lane, order)
        self._set_claims(lane, claims)
        if not candidates:
            return
        if isinstance(lane, LimitLane):
            for action, curve in candidates:
                self._start(lane, action, curve.least, curve)
            return
        self._share_units(lane, candidates, order, seen)

    # ---- candidates ----
    def _candidates(
        self, lane: Lane, order: FairOrder
    ) -> tuple[list[tuple[LiveAction, DurationCurve]], int, dict[ResourceName, LimitClaim]]:
        """The first actions that fit together, how many were examined, and claims on limits."""
        found: list[tuple[LiveAction, DurationCurve]] = []
        claims: dict[ResourceName, LimitClaim] = {}
        promised: dict[ResourceName, int] = {}
        room = _Headroom(lane, self._state.memory_mib)
        seen = skipped = elastic = 0
        most_elastic = min(lane.free, _MOST_ELASTIC)
        may_delay = self._state.settings.scheduling.may_delay
        for action in order:
            if room.free <= 0 or skipped > _MOST_SKIPPED or seen > _MOST_SEEN:
                break
            seen += 1
            if action.limits and not self._limits_fit(lane, action, promised, claims):
                skipped += 1
                if isinstance(lane, LimitLane):
                    break
                continue
            if may_delay and elastic >= most_elastic and action.curve.elastic:
                continue
            curve = limit_choices(self._curve(lane, action), lane.max_units_for(action.owner))
            if not room.admits(action, curve):
                order.drop(action.spec.tenant)
                continue
            if may_delay and self._may_be_put_off(action, curve):
                elastic += 1
            elif not room.take(action, curve):
                seen -= 1
                if room.no_memory is None or not lane.queue.shared:
                    break
                order.drop(action.spec.tenant)  # others' actions that need no memory may pass
                continue
            for resource, units in action.limits:
                promised[resource] = promised.get(resource, 0) + units
            found.append((action, curve))
        return found, seen, claims

    def _limits_fit(
        self,
        lane: Lane,
        action: LiveAction,
        promised: dict[ResourceName, int],
        claims: dict[ResourceName, LimitClaim],
    ) -> bool:
        state = self._state
        claim = action.claim
        for resource, units in action.limits:
            usage = state.limits[resource]
            wanted = units + promised.get(resource, 0)
            fits = usage.fits(wanted, state.now_s)
            if fits and resource not in claims and not usage.has_earlier_claim(lane.name, claim):
                continue
            for each, _ in action.limits:
                claims.setdefault(each, claim)
            back_s = None if fits else usage.available_s(wanted, state.now_s)
            if back_s is not None:
                state.set_alarm_once(back_s, f"limit:{resource}")
            return False
        return True

    def _set_claims(self, lane: Lane, claims: dict[ResourceName, LimitClaim]) -> None:
        """Record which limits this lane waits for; wake lanes that a dropped claim blocked."""
        for resource, usage in self._state.limits.items():
            before, now = usage.first_claims.get(lane.name), claims.get(resource)
            if before == now:
                continue
            if now is None:
                del usage.first_claims[lane.name]
            else:
                usage.first_claims[lane.name] = now
            if before is not None and (now is None or before.is_before(now)):
                self._state.touch_waiters(resource)

    def _curve(self, lane: Lane, action: LiveAction) -> DurationCurve:
        """The duration curve as known now; the mean may have been learned since its arrival."""
        spec = action.spec
        if not action.curve.known and spec.elastic is not None:
            mean_s = self._state.durations.mean_s(spec.kind)
            need = spec.need(spec.elastic.resource)
            if mean_s is not None and need is not None:
                action.curve = make_curve(need.amounts, spec.elastic.efficiency, mean_s, mean_s)
        return lane.curve(action)

    # ---- units of each candidate ----
    def _share_units(
        self,
        lane: Lane,
        candidates: list[tuple[LiveAction, DurationCurve]],
        order: FairOrder,
        seen: int,
    ) -> None:
        policy = self._state.settings.scheduling
        curves = [curve for _, curve in candidates]
        left_s: NDArray[np.float64] = np.empty(0)
        left_units: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        rest: list[DurationCurve] = []
        if policy.looks_ahead and any(curve.elastic for curve in curves):
            rest = [action.curve for action in order.after(seen, _MOST_BEHIND)]
            left_s, left_units = self._completions(lane)
        most = max(curve.choices[-1] for curve in curves)
        view = SchedulingView(
            lane.topology(most),
            lane.free,
            curves,
            rest,
            left_s,
            left_units,
            lane.capacity_units,
            len(lane) - len(candidates),
            self._count_expected_elastic(lane, curves, rest, left_s, left_units),
            lane.short,
            [self._patience_s(action, curve) for action, curve in candidates],
        )
        amounts = policy.decide(view)
        starts = [
            (units, action, curve)
            for units, (action, curve) in zip(amounts, candidates, strict=True)
            if units
        ]
        if isinstance(lane, GpuLane):
            # Large chunks first, so that any choice leaves room for the rest.
            starts.sort(key=lambda start: -start[0])
        for units, action, curve in starts:
            self._start(lane, action, units, curve)

    def _count_expected_elastic(
        self,
        lane: Lane,
        curves: list[DurationCurve],
        rest: list[DurationCurve],
        left_s: NDArray[np.float64],
        left_units: NDArray[np.int64],
    ) -> float:
        """How many elastic actions will arrive before the present backlog is done."""
        if not len(left_s):
            return 0.0
        backlog_s = float(left_s @ left_units)
        backlog_s += sum(curve.least_s * curve.least for curve in (*curves, *rest))
        expected_arrivals = lane.elastic.expect_arrivals(
            backlog_s, lane.capacity_units, self._state.now_s
        )
        return min(expected_arrivals, lane.max_arrivals)

    def _may_be_put_off(self, action: LiveAction, curve: DurationCurve) -> bool:
        """Whether short actions may pass: it could use more units and has not waited long."""
        if not curve.elastic or action.limits or action.memory_mib:
            return False
        return self._patience_s(action, curve) > 0

    def _patience_s(self, action: LiveAction, curve: DurationCurve) -> float:
        """How much longer it may be deferred: at most its duration on its least units."""
        now_s = self._state.now_s
        if action.could_start_s is None:
            action.could_start_s = now_s
        return max(action.could_start_s + curve.least_s - now_s, 0.0)

    def _completions(self, lane: Lane) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Expected remaining time and units of running attempts; overdue ones anew."""
        now_s = self._state.now_s
        for attempt in lane.running.values():
            if attempt.ends_s <= now_s:
                attempt.ends_s = now_s + self._remaining_s(attempt)
        count = len(lane.running)
        running = lane.running.values()
        ends = np.fromiter((attempt.ends_s for attempt in running), np.float64, count)
        units = np.fromiter((attempt.units for attempt in running), np.int64, count)
        return ends - now_s, units

    def _remaining_s(self, attempt: Attempt) -> float:
        spec = attempt.action.spec
        faster = spec.elastic.efficiency.speedup(attempt.units) if spec.elastic else 1.0
        ran_s = (self._state.now_s - attempt.started_s) * faster
        return max(self._state.durations.estimate_left_s(spec.kind, ran_s) / faster, 1e-3)

    # ---- starting ----
    def _start(self, lane: Lane, action: LiveAction, units: int, curve: DurationCurve) -> None:
        state = self._state
        now_s = state.now_s
        left = lane.remaining_for(action.owner)
        units = units if units <= left else curve.most(left)
        if not units:
            return  # its tenant's other actions have taken its share
        taken = lane.take(action, units, now_s)
        if taken is None:
            return
        lane.remove(action)
        del state.queued[action.spec.action]
        state.count_waiting(action, -1)
        for resource, amount in action.limits:
            state.limits[resource].take(amount, now_s)
        amounts = tuple(
            (need.resource, units if need.resource == lane.resource else need.amounts.least)
            for need in action.spec.needs
        )
        grant = Grant(amounts, taken.node, taken.cores, taken.gpus)
        number = state.number()
        ends_s = now_s + float(curve.seconds[units])
        attempt = Attempt(number, action, grant, units, now_s, ends_s, lane.name)
        action.attempt = attempt
        state.attempts[number] = attempt
        lane.start(attempt, ends_s - now_s)
        action.owner.held_mib += grant.amount(MEMORY_MIB)
        if action.environment is not None:
            action.environment.busy = attempt
        if not action.curve.elastic:
            attempt.short = True
            lane.short.change(units, now_s)
        state.counters.started += 1
        state.out.extend(taken.setup)
        state.out.append(commands.StartAction(action.spec, number, grant))
        limit_s = action.spec.limit_s
        if limit_s is not None:
            late_s = now_s + taken.setup_s + limit_s + state.settings.limit_grace_s
            state.set_alarm(late_s, f"late:{number}")
