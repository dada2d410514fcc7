"""The length of one meta-iteration, in which every job of a group rolls out once and trains once,
in order of admission on every node (WEAVE 4.3).

Its length settles at a period: the maximum cycle ratio of the precedence graph, which is the work
on a cycle divided by the number of meta-iterations that it spans.
"""

from collections.abc import Sequence

import numpy as np

from slackwater.model.ids import NodeId
from slackwater.model.placement import GroupPlan, Phase, PhaseSlot
from slackwater.policy.columns import ROLL_S, SYNC_S, TRAIN_S, Floats, Ints
from slackwater.policy.compiled import jit_compile
from slackwater.policy.ordering.priority import LoadedJob

TOLERANCE_S = 1e-6


@jit_compile
def load_s(work: Floats, pins: Ints, members: int) -> float:
    """The work on the busiest node: the train nodes, or one rollout node."""
    used = 0
    train = 0.0
    for j in range(members):
        used |= pins[j]
        train += work[TRAIN_S, j]
        if pins[j] == 0:
            train += work[ROLL_S, j]
    busiest = train
    node = 0
    while used >> node:
        load = 0.0
        for j in range(members):
            if (pins[j] >> node) & 1:
                load += work[ROLL_S, j]
        busiest = max(busiest, load)
        node += 1
    return busiest


@jit_compile
def longest_solo_s(work: Floats, members: int) -> float:
    """The longest iteration of a member running alone."""
    longest = 0.0
    for j in range(members):
        longest = max(longest, work[ROLL_S, j] + work[TRAIN_S, j] + work[SYNC_S, j])
    return longest


@jit_compile
def _relax(
    work: Floats,
    pins: Ints,
    members: int,
    period_s: float,
    start_s: Floats,
    cause: Ints,
    wraps: Ints,
) -> bool:
    """Relax all precedences once, as in Bellman-Ford. Return whether a start moved. `start_s` holds
    all rollouts, then all train phases.
    """
    moved = False
    for j in range(members):
        for i in range(members):
            if i != j and (pins[i] & pins[j]):
                wrap = 1 if i > j else 0
                at = start_s[i] + work[ROLL_S, i] - wrap * period_s
                if at > start_s[j] + TOLERANCE_S:
                    start_s[j], cause[j], wraps[j] = at, i, wrap
                    moved = True
        at = start_s[j] + work[ROLL_S, j]
        if at > start_s[members + j] + TOLERANCE_S:
            start_s[members + j], cause[members + j], wraps[members + j] = at, j, 0
            moved = True
        before = j - 1 if j else members - 1
        wrap = 0 if j else 1
        at = start_s[members + before] + work[TRAIN_S, before] - wrap * period_s
        if at > start_s[members + j] + TOLERANCE_S and members > 1:
            start_s[members + j], cause[members + j] = at, members + before
            wraps[members + j] = wrap
            moved = True
        at = start_s[members + j] + work[TRAIN_S, j] + work[SYNC_S, j] - period_s
        if at > start_s[j] + TOLERANCE_S:
            start_s[j], cause[j], wraps[j] = at, members + j, 1
            moved = True
    return moved


@jit_compile
def _critical_ratio_s(work: Floats, members: int, cause: Ints, wraps: Ints) -> float:
    """The ratio of work to meta-iterations on the cycle of the `cause` links; -1 if there is
    none.
    """
    for first in range(2 * members):
        at = first
        steps = 0
        while cause[at] >= 0 and steps <= 2 * members:
            at = cause[at]
            steps += 1
        if steps <= 2 * members:
            continue
        total_s = 0.0
        spanned = 0
        begin = at
        while True:
            source = cause[at]
            if source < members:
                total_s += work[ROLL_S, source]
            else:
                total_s += work[TRAIN_S, source - members]
                if at < members:
                    total_s += work[SYNC_S, source - members]
            spanned += wraps[at]
            at = source
            if at == begin:
                return float(total_s / spanned)
    return -1.0


@jit_compile
def round_robin_period_s(work: Floats, pins: Ints, members: int) -> float:
    """The length of one meta-iteration in the steady state. All members must use rollout nodes."""
    period = max(load_s(work, pins, members), longest_solo_s(work, members))
    while True:
        start_s = np.zeros(2 * members)
        cause = np.full(2 * members, -1, np.int64)
        wraps = np.zeros(2 * members, np.int64)
        passes = 0
        moved = True
        while moved and passes <= 2 * members + 1:
            moved = _relax(work, pins, members, period, start_s, cause, wraps)
            passes += 1
        if not moved:
            return period
        ratio = _critical_ratio_s(work, members, cause, wraps)
        if ratio <= period + TOLERANCE_S:
            return period
        period = ratio


@jit_compile
def round_robin_starts_s(work: Floats, pins: Ints, members: int, period_s: float) -> Floats:
    """The starts of all rollouts, then of all train phases, for a feasible period."""
    start_s = np.zeros(2 * members)
    cause = np.full(2 * members, -1, np.int64)
    wraps = np.zeros(2 * members, np.int64)
    passes = 0
    while passes <= 4 * members and _relax(work, pins, members, period_s, start_s, cause, wraps):
        passes += 1
    return start_s


def plan_round_robin(members: Sequence[LoadedJob]) -> GroupPlan:
    """A plan with one slot per job and phase, at worst-case lengths, in order of admission."""
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
    """A plan in which whole iterations take turns. Jobs that roll out on train nodes leave no idle
    time there to share.
    """
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
