"""The work-conserving order: any ready phase runs, highest response ratio first, as long as every
member would keep its budget if all later phases took their worst case and followed the plan.

The invariant: from some cut of the plan, every member keeps its budget at worst-case lengths. A
phase runs out of turn only if the invariant still holds after it; otherwise it waits for its turn.
The passing of time keeps the invariant, because phases never exceed their worst case and under a
fixed order only ever start earlier. Where iterations come near their worst case, a phase out of
turn must also not make any iteration exceed its target by more than the plan does.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import GroupPlan, Phase
from slackwater.policy.ordering.plan_alignment import PlanForecast
from slackwater.policy.ordering.planned_order import PlannedOrder
from slackwater.policy.ordering.priority import (
    HighestResponseRatio,
    LoadedJob,
    WaitingPhase,
    response_ratio,
)
from slackwater.policy.ordering.round_robin_cycle import plan_round_robin

# To start following a plan costs a member at most a cycle and the running phase, whatever the
# state. Another phase may end before the next check.
_PHASES_LOST = 2.0
_NO_LOSS_S = 1e-6

LoadedJobsSource = Callable[[float], Sequence[LoadedJob]]


class WorkConservingOrder(PlannedOrder):
    """`loaded_jobs(now_s)` returns the state of the members at that time."""

    def __init__(self, loaded_jobs: LoadedJobsSource) -> None:
        super().__init__()
        self._loaded_jobs = loaded_jobs
        self._by_ratio = HighestResponseRatio()
        self._plan: GroupPlan | None = None
        self._forecast: PlanForecast | None = None
        self._forecast_lengths_s: float = 0.0  # sum of the lengths that it was made with
        self._off_plan = True  # phases ran out of turn, so the cycles must start again

    def adopt(self, members: Sequence[LoadedJob], plan: GroupPlan | None) -> None:
        self._nodes = {m.job: (*m.rollout_nodes, *m.train_nodes) for m in members}
        self._cycles = {}
        self._plan = plan
        self._forecast = None
        self._off_plan = True

    def joining_loss_s(
        self, members: Sequence[LoadedJob], plan: GroupPlan | None
    ) -> tuple[float, float]:
        forecast = _forecast(plan, members)
        loss_s = 0.0 if _all_have_time(forecast, members) else forecast.loss_s(members)
        return loss_s, forecast.period_s

    def leave(self, job: JobId) -> None:
        super().leave(job)
        self._forecast = None
        self._off_plan = True

    def pick(
        self, waiting: Iterable[WaitingPhase], free: Callable[[WaitingPhase], bool], now_s: float
    ) -> WaitingPhase | None:
        waiting = tuple(waiting)
        ready = [request for request in waiting if free(request)]
        if not ready:
            return None
        if len(self._nodes) == 1:
            return ready[0]
        members = self._loaded_jobs(now_s)
        forecast = self._forecast_for(members)
        targeted = _with_targets(members)
        if not targeted and _all_have_time(forecast, members):
            self._off_plan = True
            return self._by_ratio.pick(waiting, free, now_s)
        if self._off_plan:
            self._start_cycles(forecast.align(members))
            self._off_plan = False
        ready.sort(key=lambda request: (-response_ratio(request, now_s), request.job))
        limits = [(members, _NO_LOSS_S)]
        if targeted:
            limits.append((targeted, max(forecast.loss_s(targeted), _NO_LOSS_S)))
        for request in ready:
            if self._has_turn(request):
                return request
            if all(
                forecast.loss_s(_with_phase_started(m, request)) <= most_s for m, most_s in limits
            ):
                self._off_plan = True
                return request
        return None

    def _forecast_for(self, members: Sequence[LoadedJob]) -> PlanForecast:
        """The cached forecast; made again when members left or their lengths changed."""
        lengths_s = sum(member.rollout_s + member.train_s for member in members)
        if self._forecast is None or lengths_s != self._forecast_lengths_s:
            self._forecast = _forecast(self._plan, members)
            self._forecast_lengths_s = lengths_s
        return self._forecast

    def record_start(self, job: JobId, phase: Phase, nodes: Sequence[NodeId]) -> None:
        if not self._off_plan:
            super().record_start(job, phase, nodes)


def _forecast(plan: GroupPlan | None, members: Sequence[LoadedJob]) -> PlanForecast:
    return PlanForecast(plan or plan_round_robin(members), members)


def _all_have_time(forecast: PlanForecast, members: Sequence[LoadedJob]) -> bool:
    """Whether all members could start following the plan in any state, so that no simulation is
    needed.
    """
    lost_s = forecast.period_s + _PHASES_LOST * forecast.longest_s
    for member in members:
        if member.bound_s < math.inf or forecast.spare_s(member) < lost_s:
            return False
    return True


def _with_targets(members: Sequence[LoadedJob]) -> Sequence[LoadedJob]:
    """The members with their targets as bounds; empty if no member has a target."""
    if all(member.target_s == math.inf for member in members):
        return ()
    return [replace(m, bound_s=min(m.bound_s, m.target_s)) for m in members]


def _with_phase_started(members: Sequence[LoadedJob], request: WaitingPhase) -> list[LoadedJob]:
    """The members' state if this phase started now."""
    return [
        _start_phase(member, request.phase) if member.job == request.job else member
        for member in members
    ]


def _start_phase(member: LoadedJob, phase: Phase) -> LoadedJob:
    if phase is Phase.ROLLOUT:
        running_s, then = member.rollout_s, Phase.TRAIN
    else:
        running_s, then = member.train_s + member.sync_s, Phase.ROLLOUT
    return replace(member, next_phase=then, running_s=running_s, clock_runs=True)
