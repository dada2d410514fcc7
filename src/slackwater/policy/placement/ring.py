"""Fit phases into the free windows of a repeating cycle on a group's nodes. Time is a ring.

Row 0 of the arrays is the train nodes, which run each phase together; row i + 1 is rollout node i.
`at` and `length` hold the busy windows of each row, `count` their number. A job's iterations are a
chain of rollout, train and sync; each phase takes the first free window on its nodes after the
phase before it (interval fitting, PlexRL 4.3 and 5.2).
"""

import numpy as np

from slackwater.policy.columns import ROLL_S, SYNC_S, TRAIN_S, Floats, Ints
from slackwater.policy.compiled import copy_row, jit_compile
from slackwater.policy.ordering.round_robin_cycle import TOLERANCE_S


@jit_compile
def first_fit_on_node_s(
    at: Floats, length: Floats, count: int, period_s: float, from_s: float, need_s: float
) -> float:
    """The earliest start from `from_s` on at which one node is free for `need_s`; infinite if there
    is none within a period.

    The windows do not overlap, and are sorted by their start in the ring.
    """
    if count == 0:
        return from_s
    turn = np.floor(from_s / period_s) * period_s
    i = count - 1
    while i >= 0 and at[i] > from_s - turn:
        i -= 1
    if i < 0:
        i = count - 1
        turn -= period_s
    start = from_s
    for _ in range(count + 1):
        begin = turn + at[i]
        if begin >= start + need_s - TOLERANCE_S:
            return start
        start = max(start, begin + length[i])
        i += 1
        if i == count:
            i = 0
            turn += period_s
    if turn + at[i] >= start + need_s - TOLERANCE_S:
        return start
    return np.inf


@jit_compile
def first_fit_s(
    pins: int,
    at: Floats,
    length: Floats,
    count: Ints,
    period_s: float,
    from_s: float,
    need_s: float,
) -> float:
    """The earliest start at which all pinned nodes are free together; no pins mean the train
    nodes.
    """
    if pins == 0:
        return first_fit_on_node_s(at[0], length[0], count[0], period_s, from_s, need_s)
    start = from_s
    moved = True
    while moved:
        moved = False
        node = 0
        while pins >> node:
            if (pins >> node) & 1:
                row = node + 1
                later = first_fit_on_node_s(
                    at[row], length[row], count[row], period_s, start, need_s
                )
                if later > start + TOLERANCE_S:
                    start = later
                    moved = True
            node += 1
        if start > from_s + period_s + TOLERANCE_S:
            return np.inf
    return start


@jit_compile
def occupy(
    pins: int,
    at: Floats,
    length: Floats,
    count: Ints,
    period_s: float,
    start_s: float,
    need_s: float,
) -> None:
    """Reserve a window on all pinned nodes; no pins mean the train nodes."""
    node = 0
    while node == 0 or pins >> (node - 1):
        if (node == 0 and pins == 0) or (node > 0 and (pins >> (node - 1)) & 1):
            begin = start_s % period_s
            i = count[node]
            while i > 0 and at[node, i - 1] > begin:
                at[node, i], length[node, i] = at[node, i - 1], length[node, i - 1]
                i -= 1
            at[node, i], length[node, i] = begin, need_s
            count[node] += 1
        node += 1


@jit_compile
def fit_chain_s(
    work: Floats,
    job: int,
    pins: int,
    rounds: int,
    at: Floats,
    length: Floats,
    count: Ints,
    period_s: float,
    from_s: float,
    starts: Floats,
) -> float:
    """Fit `rounds` iterations from `from_s` on and write their starts. Return how long they take,
    infinite if more than a period.
    """
    ready = from_s
    alone_s = work[ROLL_S, job] + work[TRAIN_S, job] + work[SYNC_S, job]
    for i in range(rounds):
        roll = first_fit_s(pins, at, length, count, period_s, ready, work[ROLL_S, job])
        train = first_fit_s(
            0, at, length, count, period_s, roll + work[ROLL_S, job], work[TRAIN_S, job]
        )
        ready = train + work[TRAIN_S, job] + work[SYNC_S, job]
        starts[0, i], starts[1, i] = roll, train
        if not ready + (rounds - 1 - i) * alone_s <= starts[0, 0] + period_s + TOLERANCE_S:
            return np.inf
    return float(ready - starts[0, 0])


@jit_compile
def _shift(starts: Floats, by_s: float) -> None:
    for phase in range(len(starts)):
        for i in range(starts.shape[1]):
            starts[phase, i] += by_s


@jit_compile
def insert_chain(
    work: Floats,
    job: int,
    pins: int,
    rounds: int,
    at: Floats,
    length: Floats,
    count: Ints,
    period_s: float,
    starts: Floats,
) -> bool:
    """Reserve windows for a job's chain at the shift with the least waiting (micro-shift); False if
    no shift fits.
    """
    trial = np.zeros_like(starts)
    work_s = rounds * (work[ROLL_S, job] + work[TRAIN_S, job] + work[SYNC_S, job])
    own = 0
    if pins:
        while not (pins >> own) & 1:
            own += 1
        own += 1
    best = np.inf
    for shift in range(1 + count[own] + count[0]):
        begin = 0.0
        if shift > count[own]:
            i = shift - 1 - count[own]
            begin = at[0, i] + length[0, i] - work[ROLL_S, job]
        elif shift:
            begin = at[own, shift - 1] + length[own, shift - 1]
        begin %= period_s
        taken = fit_chain_s(work, job, pins, rounds, at, length, count, period_s, begin, trial)
        if taken < best - TOLERANCE_S:
            best = taken
            for phase in range(len(starts)):
                copy_row(starts[phase], trial[phase], starts.shape[1])
            if best <= work_s + TOLERANCE_S:
                break
    if best == np.inf:
        return False
    _shift(starts, -np.floor(starts[0, 0] / period_s) * period_s)
    for i in range(rounds):
        occupy(pins, at, length, count, period_s, starts[0, i], work[ROLL_S, job])
        occupy(0, at, length, count, period_s, starts[1, i], work[TRAIN_S, job])
    return True
