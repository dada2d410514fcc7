"""Where in its cycle a group takes up a new plan: at the cut after which the members lose least.

Members are caught at any point of their iterations. From every cut of the cycle the plan is run forward at worst-case lengths, with
each member's first slot passed over if it is for the phase that the member is not at; the cut is taken that costs no member more
than it can bear, and all together least.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import GroupPlan, Phase, PhaseSlot
from slackwater.policy.ordering.priority import LoadedJob

_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Alignment:
    """The plan's slots from the cut on, and which of them are passed over the first time.

    `worst_loss_s` is by how much a member may fall behind beyond what it can bear.
    """

    slots: tuple[PhaseSlot, ...]
    skip_first: tuple[bool, ...]
    worst_loss_s: float


def align(plan: GroupPlan, members: Sequence[LoadedJob]) -> Alignment:
    """The best cut of the plan for members that stand as they do; slots of absent jobs are left out."""
    present = {member.job for member in members}
    slots = sorted(
        (slot for slot in plan.slots if slot.job in present),
        key=lambda slot: (slot.start_s % plan.period_s, slot.job, slot.phase),
    )
    best: tuple[tuple[float, float], Alignment] | None = None
    for cut in range(max(len(slots), 1)):
        order = (*slots[cut:], *slots[:cut])
        skip = _unusable_first(order, members)
        losses = _losses(order, skip, plan, members)
        beyond = max((loss - slack for loss, slack in losses), default=0.0)
        score = (max(beyond, 0.0), sum(loss for loss, _ in losses))
        if best is None or score < best[0]:
            best = (score, Alignment(order, skip, max(beyond, 0.0)))
    assert best is not None
    return best[1]


def _unusable_first(order: Sequence[PhaseSlot], members: Sequence[LoadedJob]) -> tuple[bool, ...]:
    """A member's first slot is passed over if it is for the other phase."""
    wanted = {member.job: member.next_phase for member in members}
    skip = []
    for slot in order:
        phase = wanted.pop(slot.job, slot.phase)
        skip.append(phase is not slot.phase)
    return tuple(skip)


def _losses(
    order: Sequence[PhaseSlot], skip: Sequence[bool], plan: GroupPlan, members: Sequence[LoadedJob]
) -> list[tuple[float, float]]:
    """Per member, how far it is behind an even pace after some rounds at worst, and how far it may be."""
    by_job = {member.job: member for member in members}
    ready = {member.job: member.running_s for member in members}
    free: dict[NodeId, float] = {}
    for member in members:
        held = member.rollout_nodes if member.next_phase is Phase.TRAIN else member.train_nodes
        after = 0.0 if member.next_phase is Phase.TRAIN else member.sync_s
        for node in held:
            free[node] = max(free.get(node, 0.0), member.running_s - after)
    # Who trains now is about to end an iteration that counts as one of those left.
    made: dict[JobId, int] = {
        member.job: int(member.next_phase is Phase.ROLLOUT and member.running_s > member.sync_s)
        for member in members
    }
    begun: dict[JobId, float] = {member.job: 0.0 for member in members if member.clock_runs}
    for number in range(_ROUNDS):
        for slot, skipped in zip(order, skip, strict=True):
            if skipped and number == 0:
                continue
            start = max(ready[slot.job], max(free.get(node, 0.0) for node in slot.nodes))
            begun.setdefault(slot.job, start)
            end = start + slot.length_s
            for node in slot.nodes:
                free[node] = end
            ready[slot.job] = end
            if slot.phase is Phase.TRAIN:
                ready[slot.job] = end + by_job[slot.job].sync_s
                made[slot.job] += 1
    losses = []
    for member in members:
        pace = plan.period_s / max(plan.rounds(member.job), 1)
        taken = ready[member.job] - begun.get(member.job, 0.0)
        slack = member.budget_s - member.iterations_left * pace
        losses.append((taken - made[member.job] * pace, slack))
    return losses


def worst_period_s(
    plan: GroupPlan,
    lengths_s: Mapping[tuple[JobId, Phase], float],
    syncs_s: Mapping[JobId, float],
) -> float:
    """How long one cycle of the plan's order takes in the long run with these phase lengths."""
    order = sorted(
        (slot for slot in plan.slots if slot.job in syncs_s),
        key=lambda slot: (slot.start_s % plan.period_s, slot.job, slot.phase),
    )
    ready: dict[JobId, float] = {}
    free: dict[NodeId, float] = {}
    ends: list[float] = []
    rounds = 2 * len(syncs_s) + 2
    for _ in range(rounds):
        for slot in order:
            start = max(ready.get(slot.job, 0.0), max(free.get(node, 0.0) for node in slot.nodes))
            end = start + lengths_s[slot.job, slot.phase]
            free.update(dict.fromkeys(slot.nodes, end))
            ready[slot.job] = end + (syncs_s[slot.job] if slot.phase is Phase.TRAIN else 0.0)
        ends.append(max(ready.values(), default=0.0))
    # The growth per round settles to a pattern no longer than the number of jobs; its mean is the period.
    half = rounds // 2
    return (ends[-1] - ends[half - 1]) / (rounds - half)
