"""Where in its cycle a group takes up a new plan: at the cut after which the members lose least.

Members are caught at any point of their iterations. From every cut of the cycle the plan is run
forward at worst-case lengths, with each member's first slot passed over if it is for the phase that
the member is not at; the cut is taken that costs no member more than it can bear, and all together
least.
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
    """The best cut of the plan for members that stand as they do; slots of absent jobs are left
    out.
    """
    present = {member.job for member in members}
    slots = sorted(
        (slot for slot in plan.slots if slot.job in present),
        key=lambda slot: (slot.start_s % plan.period_s, slot.job, slot.phase),
    )
    forward = _Forward(slots, plan, members)
    best_cut, best_score = 0, (float("inf"), float("inf"))
    for cut in range(max(len(slots), 1)):
        score = forward.score(cut)
        if score < best_score:
            best_cut, best_score = cut, score
    order = (*slots[best_cut:], *slots[:best_cut])
    return Alignment(order, _unusable_first(order, members), best_score[0])


def _unusable_first(order: Sequence[PhaseSlot], members: Sequence[LoadedJob]) -> tuple[bool, ...]:
    """A member's first slot is passed over if it is for the other phase."""
    wanted = {member.job: member.next_phase for member in members}
    skip = []
    for slot in order:
        phase = wanted.pop(slot.job, slot.phase)
        skip.append(phase is not slot.phase)
    return tuple(skip)


class _Forward:
    """The plan run forward from a cut. Members and nodes are numbers here: a group that changes is
    tried at every cut, while permits wait.
    """

    def __init__(
        self, slots: Sequence[PhaseSlot], plan: GroupPlan, members: Sequence[LoadedJob]
    ) -> None:
        self._members = members
        numbers = {member.job: number for number, member in enumerate(members)}
        nodes: dict[NodeId, int] = {}
        self._slots = [
            (
                numbers[slot.job],
                slot.phase,
                [nodes.setdefault(node, len(nodes)) for node in slot.nodes],
                slot.length_s,
            )
            for slot in slots
        ]
        self._free = [0.0] * len(nodes)
        for member in members:
            trains = member.next_phase is Phase.TRAIN
            held_s = member.running_s - (0.0 if trains else member.sync_s)
            for node in member.rollout_nodes if trains else member.train_nodes:
                if node in nodes:
                    self._free[nodes[node]] = max(self._free[nodes[node]], held_s)
        # Who trains now is about to end an iteration that counts as one of those left.
        self._made = [
            int(m.next_phase is Phase.ROLLOUT and m.running_s > m.sync_s) for m in members
        ]
        self._paces = [plan.period_s / max(plan.rounds(member.job), 1) for member in members]

    def score(self, cut: int) -> tuple[float, float]:
        """The worst loss of a member beyond what it can bear, and what all lose together."""
        ready = [member.running_s for member in self._members]
        begun = [0.0 if member.clock_runs else None for member in self._members]
        free, made = self._free.copy(), self._made.copy()
        first: list[Phase | None] = [member.next_phase for member in self._members]
        order = self._slots[cut:] + self._slots[:cut]
        for number in range(_ROUNDS):
            for job, phase, nodes, length_s in order:
                if number == 0 and (wanted := first[job]) is not None:
                    first[job] = None
                    if wanted is not phase:
                        continue
                start = ready[job]
                for node in nodes:
                    if free[node] > start:
                        start = free[node]
                if begun[job] is None:
                    begun[job] = start
                end = start + length_s
                for node in nodes:
                    free[node] = end
                if phase is Phase.TRAIN:
                    end += self._members[job].sync_s
                    made[job] += 1
                ready[job] = end
        beyond = together = 0.0
        for job, member in enumerate(self._members):
            pace = self._paces[job]
            loss = ready[job] - (begun[job] or 0.0) - made[job] * pace
            beyond = max(beyond, loss - (member.budget_s - member.iterations_left * pace))
            together += loss
        return beyond, together


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
    # The growth per round settles to a pattern no longer than the number of jobs; its mean is the
    # period.
    half = rounds // 2
    return (ends[-1] - ends[half - 1]) / (rounds - half)
