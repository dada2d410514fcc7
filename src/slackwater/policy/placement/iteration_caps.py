"""Caps on the length of a single iteration, and a check whether a cycle keeps them in execution.

A group follows the order of its plan, not the times: each phase begins as soon as its job and its
nodes are free. So an iteration can end earlier than planned. The next one then begins earlier too,
but may end at its planned time, and takes longer than the planned times suggest.
"""

import math

import numpy as np

from slackwater.model.job import JobSpec
from slackwater.policy.columns import CAP_S, ROLL_S, ROUNDS, SYNC_S, TRAIN_S, Floats, Ints
from slackwater.policy.compiled import jit_compile, stable_order

# Share of the declared lengths. Jobs whose iterations are shorter than this seldom miss their
# bound.
NEAR_WORST = 0.7
# How much of the time saved by short iterations a plan may use, as an exponent. The rest is a
# margin for iterations that are longer than the recent ones: at 1, half of them would miss their
# bound.
PLANNED_SHARE = 1 / 3
# Margin of a bound: execution may settle into another rhythm of the order than the checked one.
_MARGIN = 0.005
_TOLERANCE = 1e-9


def iteration_cap_s(spec: JobSpec, share: float) -> float:
    """The longest iteration, at worst-case lengths, that a plan may give a job. `share` is its
    recent iteration time over the worst case.

    If the SLO is per iteration, the cap is the bound. If it covers the whole job, the cap exceeds
    the bound by so much that an iteration somewhat longer than the recent ones still keeps it. If
    recent iterations are far from their worst case, there is no cap.
    """
    bound_s = spec.slo * spec.profile.solo_s
    if spec.slo_scope == "iteration":
        return max(bound_s * (1 - _MARGIN), spec.profile.solo_s)
    return bound_s / math.pow(share, PLANNED_SHARE) if share >= NEAR_WORST else math.inf


@jit_compile
def _order_phases(work: Floats, members: int, period_s: float, starts: Floats) -> Ints:
    """The phases of a cycle by start time. A rollout of member j is 2 j, a train phase 2 j + 1."""
    most, count = starts.shape[2], 0
    at = np.full(2 * members * most, np.inf)
    for j in range(members):
        for phase in range(2):
            for i in range(int(work[ROUNDS, j])):
                at[(2 * j + phase) * most + i] = starts[j, phase, i] % period_s
                count += 1
    phases = np.empty(count, np.int64)
    order = stable_order(at)
    for i in range(count):
        phases[i] = order[i] // most
    return phases


@jit_compile
def has_caps(work: Floats, members: int) -> bool:
    """Whether any member has a cap."""
    capped = False
    for j in range(members):
        capped = capped or work[CAP_S, j] < np.inf
    return capped


@jit_compile
def keeps_caps(work: Floats, pins: Ints, members: int, period_s: float, starts: Floats) -> bool:
    """Whether every iteration keeps its cap at worst-case lengths, once the order was repeated
    until it settled.
    """
    if not has_caps(work, members):
        return True
    phases = _order_phases(work, members, period_s, starts)
    free, ready, ended = np.zeros(64), np.zeros(members), np.zeros(members)
    for cycle in range(2 * members + 2):
        for number in phases:
            j, trains = number // 2, number % 2 == 1
            # Bit 0 is the train nodes, the others are the rollout nodes.
            nodes = 1 if trains or pins[j] == 0 else pins[j] << 1
            start, node = ready[j], 0
            while nodes >> node:
                if (nodes >> node) & 1:
                    start = max(start, free[node])
                node += 1
            end = start + (work[TRAIN_S, j] if trains else work[ROLL_S, j])
            for held in range(node):
                if (nodes >> held) & 1:
                    free[held] = end
            ready[j] = end
            if trains:
                ready[j] += work[SYNC_S, j]
                longest = work[CAP_S, j] * (1 + _TOLERANCE)
                if cycle > members and ready[j] - ended[j] > longest:
                    return False
                ended[j] = ready[j]
    return True
