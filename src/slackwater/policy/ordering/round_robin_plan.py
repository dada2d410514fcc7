"""Round robin: each job rolls out and trains once per cycle, in order of admission (WEAVE 4.3)."""

from collections.abc import Sequence

import numpy as np

from slackwater.model.ids import NodeId
from slackwater.model.placement import GroupPlan, Phase, PhaseSlot
from slackwater.policy.columns import ROLL_S, SYNC_S, TRAIN_S
from slackwater.policy.ordering.priority import LoadedJob
from slackwater.policy.ordering.round_robin_cycle import round_robin_period_s, round_robin_starts_s


def plan_round_robin(members: Sequence[LoadedJob]) -> GroupPlan:
    """One slot per job and phase at worst-case lengths; members stand in order of admission."""
    if any(member.rollout_nodes == member.train_nodes for member in members):
        return _plan_one_after_another(members)
    number: dict[NodeId, int] = {}
    for member in members:
        for node in member.rollout_nodes:
            number.setdefault(node, len(number))
    work = np.zeros((1 + max(ROLL_S, TRAIN_S, SYNC_S), len(members)))
    work[ROLL_S] = [member.rollout_s for member in members]
    work[TRAIN_S] = [member.train_s for member in members]
    work[SYNC_S] = [member.sync_s for member in members]
    pins = np.array(
        [sum(1 << number[node] for node in member.rollout_nodes) for member in members], np.int64
    )
    period_s = round_robin_period_s(work, pins, len(members))
    starts_s = round_robin_starts_s(work, pins, len(members), period_s)
    slots: list[PhaseSlot] = []
    for index, member in enumerate(members):
        at_s = float(starts_s[index]), float(starts_s[len(members) + index])
        slots.extend(_slots(member, *at_s))
    return GroupPlan(float(period_s), tuple(slots))


def _plan_one_after_another(members: Sequence[LoadedJob]) -> GroupPlan:
    """Jobs that roll out on train nodes leave no bubble there: whole iterations take turns."""
    slots: list[PhaseSlot] = []
    at_s = 0.0
    for member in members:
        slots.extend(_slots(member, at_s, at_s + member.rollout_s))
        at_s += member.rollout_s + member.train_s
    longest_s = max(m.rollout_s + m.train_s + m.sync_s for m in members)
    return GroupPlan(max(at_s, longest_s), tuple(slots))


def _slots(
    member: LoadedJob, rollout_at_s: float, train_at_s: float
) -> tuple[PhaseSlot, PhaseSlot]:
    return (
        PhaseSlot(member.job, Phase.ROLLOUT, member.rollout_nodes, rollout_at_s, member.rollout_s),
        PhaseSlot(member.job, Phase.TRAIN, member.train_nodes, train_at_s, member.train_s),
    )
