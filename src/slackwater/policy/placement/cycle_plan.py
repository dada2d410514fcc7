"""Turn the fitted cycle of a group into the plan that its phases follow."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slackwater.model.ids import JobId
from slackwater.model.placement import GroupPlan, Phase, PhaseSlot
from slackwater.policy.columns import ROLL_S, ROUNDS, SYNC_S, TRAIN_S, Floats
from slackwater.policy.ordering.plan_alignment import worst_period_s
from slackwater.policy.placement.cycle_fitting import MAX_ROUNDS, fit_cycle
from slackwater.policy.placement.groups import GroupRegistry
from slackwater.policy.placement.iteration_caps import keeps_caps


@dataclass(frozen=True, slots=True)
class FittedCycle:
    """A repeating schedule: the period, each member's rounds, and `starts[member, phase,
    round]`.
    """

    period_s: float
    rounds: Floats
    starts: Floats


def fit_group(registry: GroupRegistry, row: int) -> FittedCycle | None:
    """Find a cycle that keeps every member of a group within its budget, or None."""
    table = registry.table
    count = int(table.members[row])
    starts = np.zeros((count, 2, MAX_ROUNDS))
    work = table.work[row].copy()
    if count == 1:
        work[ROUNDS, 0] = 1
        starts[0, 1, 0] = work[ROLL_S, 0]
        period_s = float(work[ROLL_S, 0] + work[TRAIN_S, 0] + work[SYNC_S, 0])
    else:
        period_s = fit_cycle(work, table.pins[row], count, starts, np.zeros(1, np.int64))
    return FittedCycle(period_s, work[ROUNDS, :count], starts) if period_s else None


def adopt_cycle(
    registry: GroupRegistry, row: int, jobs: Sequence[JobId], cycle: FittedCycle
) -> None:
    """Make a cycle the plan of a group; its members are `jobs`, in this order."""
    group, work = registry.groups[row], registry.table.work[row]
    slots = []
    for position, job in enumerate(jobs):
        index = registry.members[job].index
        work[ROUNDS, index] = cycle.rounds[position]
        rollout_nodes = registry.rollout_nodes(job)
        roll_s, train_s = float(work[ROLL_S, index]), float(work[TRAIN_S, index])
        for turn in range(int(cycle.rounds[position])):
            roll_at, train_at = (float(at) for at in cycle.starts[position, :, turn])
            slots.append(PhaseSlot(job, Phase.ROLLOUT, rollout_nodes, roll_at, roll_s))
            slots.append(PhaseSlot(job, Phase.TRAIN, group.train, train_at, train_s))
    slots.sort(key=lambda slot: (slot.start_s, slot.job))
    registry.table.cycle_s[row] = cycle.period_s
    group.plan = GroupPlan(cycle.period_s, tuple(slots))


def plan_period_s(registry: GroupRegistry, row: int) -> float:
    """The worst-case length of one cycle of the group's plan. It is shorter than the plan's period
    when jobs have left.
    """
    group, work = registry.groups[row], registry.table.work[row]
    assert group.plan is not None
    lengths_s = {(slot.job, slot.phase): slot.length_s for slot in group.plan.slots}
    syncs_s = {job: float(work[SYNC_S, registry.members[job].index]) for job in group.jobs}
    return worst_period_s(group.plan, lengths_s, syncs_s)


def plan_keeps_caps(registry: GroupRegistry, row: int) -> bool:
    """Whether a group's plan still keeps every iteration within its cap after a member left. The
    others then run earlier, but not all by the same time, so a single iteration can grow.
    """
    group, table = registry.groups[row], registry.table
    assert group.plan is not None
    starts = np.zeros((len(group.jobs), 2, MAX_ROUNDS))
    for position, job in enumerate(group.jobs):
        for phase, number in ((Phase.ROLLOUT, 0), (Phase.TRAIN, 1)):
            own = [s.start_s for s in group.plan.slots if s.job == job and s.phase is phase]
            starts[position, number, : len(own)] = own
    count, period_s = len(group.jobs), group.plan.period_s
    return keeps_caps(table.work[row], table.pins[row], count, period_s, starts)
