"""Where in its cycle a group starts to follow a plan: at the cut that delays its members least.

A cut is a position in the plan's sequence of slots. From every cut the plan is simulated at
worst-case lengths. A member's first slot is skipped if it is for the other phase than the one that
the member needs next. The best cut delays no member beyond its slack, and all members together
least.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import GroupPlan, Phase, PhaseSlot
from slackwater.policy.columns import Floats, Ints
from slackwater.policy.compiled import jit_compile
from slackwater.policy.ordering.priority import LoadedJob

_ROUNDS = 3
# Rows of the array that describes the members; each column is a member.
(
    READY_S,
    SYNC_S,
    STARTED,
    MADE,
    PACE_S,
    BUDGET_S,
    LEFT,
    AFTER_S,  # the time it needs after the running iteration if it then moves to its own nodes
    BOUND_S,
    ITERATION_S,
    FIRST,
    ROLL_S,
    TRAIN_S,
) = range(13)
_MEMBER_ROWS = 13
_ROLLOUT, _TRAIN = 0.0, 1.0


@dataclass(frozen=True, slots=True)
class Alignment:
    """The plan's slots in order from the cut on, and which of them are skipped the first time."""

    slots: tuple[PhaseSlot, ...]
    skip_first: tuple[bool, ...]


class PlanForecast:
    """Simulates a plan at worst-case lengths, without the slots of absent jobs. `period_s` is the
    length of one cycle in the long run.
    """

    def __init__(self, plan: GroupPlan, members: Sequence[LoadedJob]) -> None:
        self._number = {member.job: number for number, member in enumerate(members)}
        self.slots = sorted(
            (slot for slot in plan.slots if slot.job in self._number),
            key=lambda slot: (slot.start_s % plan.period_s, slot.job, slot.phase),
        )
        nodes: dict[NodeId, int] = {}
        self._jobs: Ints = np.array([self._number[slot.job] for slot in self.slots], np.int64)
        self._trains: Ints = np.array([slot.phase is Phase.TRAIN for slot in self.slots], np.int64)
        width = max((len(slot.nodes) for slot in self.slots), default=1)
        self._nodes: Ints = np.full((len(self.slots), width), -1, np.int64)
        for row, slot in enumerate(self.slots):
            self._nodes[row, : len(slot.nodes)] = [
                nodes.setdefault(node, len(nodes)) for node in slot.nodes
            ]
        self._node_numbers = nodes
        lengths_s = {
            (member.job, phase): length_s
            for member in members
            for phase, length_s in (
                (Phase.ROLLOUT, member.rollout_s),
                (Phase.TRAIN, member.train_s),
            )
        }
        self.period_s = worst_period_s(plan, lengths_s, {m.job: m.sync_s for m in members})
        self.pace_s = {m.job: self.period_s / max(plan.rounds(m.job), 1) for m in members}
        self.longest_s = max((max(m.rollout_s, m.train_s) for m in members), default=0.0)

    def spare_s(self, member: LoadedJob) -> float:
        """How much a member may fall behind the plan's pace, whether it stays or moves to its own
        nodes.
        """
        pace_s = self.pace_s[member.job]
        return member.budget_s - min(member.iterations_left * pace_s, member.leave_s + pace_s)

    def align(self, members: Sequence[LoadedJob]) -> Alignment:
        """The plan from the best cut on, for the members' present state."""
        cut, _ = self._best_cut(members)
        order = (*self.slots[cut:], *self.slots[:cut])
        return Alignment(order, _mark_skipped(order, members))

    def loss_s(self, members: Sequence[LoadedJob]) -> float:
        """The worst delay of a member beyond its slack, at the best cut."""
        return self._best_cut(members)[1]

    def _best_cut(self, members: Sequence[LoadedJob]) -> tuple[int, float]:
        state = np.zeros((_MEMBER_ROWS, len(members)))
        free: Floats = np.zeros(len(self._node_numbers))
        for member in members:
            trains = member.next_phase is Phase.TRAIN
            state[:, self._number[member.job]] = (
                member.running_s,
                member.sync_s,
                float(member.clock_runs),
                # A job in its train phase is about to end an iteration that is one of those left.
                float(not trains and member.running_s > member.sync_s),
                self.pace_s[member.job],
                member.budget_s,
                float(member.iterations_left),
                member.leave_s * (1 - 1 / max(member.iterations_left, 1)),
                member.bound_s,
                member.iteration_s,
                _TRAIN if trains else _ROLLOUT,
                member.rollout_s,
                member.train_s,
            )
            held_s = member.running_s - (0.0 if trains else member.sync_s)
            for node in member.rollout_nodes if trains else member.train_nodes:
                if node in self._node_numbers:
                    at = self._node_numbers[node]
                    free[at] = max(free[at], held_s)
        cut, beyond_s = _simulate_all_cuts(self._jobs, self._trains, self._nodes, state, free)
        return int(cut), float(beyond_s)


def _mark_skipped(order: Sequence[PhaseSlot], members: Sequence[LoadedJob]) -> tuple[bool, ...]:
    """Whether each slot is skipped: a member's first one, if it is not for its next phase."""
    wanted = {member.job: member.next_phase for member in members}
    skip = []
    for slot in order:
        phase = wanted.pop(slot.job, slot.phase)
        skip.append(phase is not slot.phase)
    return tuple(skip)


@jit_compile
def _simulate_all_cuts(
    jobs: Ints, trains: Ints, nodes: Ints, state: Floats, free_s: Floats
) -> tuple[int, float]:
    """The cut with the least worst delay beyond a member's slack, then with the least total delay.
    Returns the cut and its worst delay.
    """
    best_cut, best_beyond, best_together = 0, np.inf, np.inf
    for cut in range(max(jobs.shape[0], 1)):
        beyond, together = _simulate_from(cut, jobs, trains, nodes, state, free_s)
        if beyond < best_beyond or (beyond == best_beyond and together < best_together):
            best_cut, best_beyond, best_together = cut, beyond, together
    return best_cut, best_beyond


@jit_compile
def _earliest_start_s(nodes: Ints, free: Floats, ready_s: float) -> float:
    """When a slot can start: the job is ready and all its nodes are free."""
    start = ready_s
    for node in nodes:
        if node >= 0 and free[node] > start:
            start = free[node]
    return start


@jit_compile
def _sum_losses(
    state: Floats,
    ready: Floats,
    begun: Floats,
    made: Floats,
    late: Floats,
    late_if_leaving: Floats,
) -> tuple[float, float]:
    """The worst delay of a member beyond its slack, and the total delay of all members."""
    beyond = together = 0.0
    for j in range(state.shape[1]):
        if state[LEFT, j] > state[MADE, j]:
            beyond = max(beyond, min(late[j], late_if_leaving[j]))
        together += ready[j] - max(begun[j], 0.0) - made[j] * state[PACE_S, j]
    return beyond, together


@jit_compile
def _init_members(
    state: Floats, begun: Floats, iteration_at: Floats, late: Floats, late_if_leaving: Floats
) -> None:
    """Set the members' state before the first slot. Hazard: numba takes seconds to compile
    `np.where`.
    """
    for j in range(state.shape[1]):
        begun[j] = 0.0 if state[STARTED, j] > 0.0 else -1.0
        iteration_at[j], late[j], late_if_leaving[j] = -state[ITERATION_S, j], -np.inf, np.inf
        if state[MADE, j] > 0.0:
            iteration_at[j] = state[READY_S, j]
            late_if_leaving[j] = state[READY_S, j] + state[AFTER_S, j] - state[BUDGET_S, j]


@jit_compile
def _simulate_from(
    cut: int, jobs: Ints, trains: Ints, nodes: Ints, state: Floats, free_s: Floats
) -> tuple[float, float]:
    """Simulate the plan from a cut: the worst delay of a member beyond its slack, and the total."""
    slots = jobs.shape[0]
    ready, made, free = state[READY_S].copy(), state[MADE].copy(), free_s.copy()
    count = ready.shape[0]
    begun, iteration_at, fresh = np.empty(count), np.empty(count), np.ones(count, np.bool_)
    late, late_if_leaving = np.empty(count), np.empty(count)  # if it stays, if it leaves
    _init_members(state, begun, iteration_at, late, late_if_leaving)
    beyond = 0.0
    for step in range(_ROUNDS * slots):
        at = (cut + step) % slots
        j = jobs[at]
        if fresh[j]:
            fresh[j] = False
            if state[FIRST, j] != trains[at]:
                continue
        start = _earliest_start_s(nodes[at], free, ready[j])
        if begun[j] < 0.0:
            begun[j] = iteration_at[j] = start
        end = start + (state[TRAIN_S, j] if trains[at] else state[ROLL_S, j])
        for node in nodes[at]:
            if node >= 0:
                free[node] = end
        ready[j] = end
        if not trains[at]:
            continue
        ready[j] = end = end + state[SYNC_S, j]
        made[j] += 1.0
        left = state[LEFT, j] - made[j]
        after = end - begun[j] - state[BUDGET_S, j]
        if made[j] == 1.0:
            late_if_leaving[j] = after + state[AFTER_S, j]
        # The last simulated round repeats from then on. Iterations within a cycle need not be
        # evenly spaced, so each of them counts.
        if left == 0.0:
            late[j] = after
        elif left > 0.0 and step >= (_ROUNDS - 1) * slots:
            late[j] = max(late[j], after + left * state[PACE_S, j])
        beyond = max(beyond, end - iteration_at[j] - state[BOUND_S, j])
        iteration_at[j] = end
    worst, together = _sum_losses(state, ready, begun, made, late, late_if_leaving)
    return max(beyond, worst), together


def worst_period_s(
    plan: GroupPlan, lengths_s: Mapping[tuple[JobId, Phase], float], syncs_s: Mapping[JobId, float]
) -> float:
    """The length of one cycle of the plan's order in the long run, with these phase lengths."""
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
    # The lengths of the rounds settle to a pattern that repeats after at most as many rounds as
    # there are jobs. Their mean is the period.
    half = rounds // 2
    return (ends[-1] - ends[half - 1]) / (rounds - half)
