"""A fitted cycle overlaps nothing, and gives every job the iterations that its budget asks for."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from phase_execution import run_plan

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import GroupPlan, Phase, PhaseSlot
from slackwater.policy.columns import (
    BUDGET_S,
    CAP_S,
    LEFT,
    ROLL_S,
    ROUNDS,
    SYNC_S,
    TRAIN_S,
    WORK_ROWS,
    Floats,
    Ints,
)
from slackwater.policy.placement.cycle_fitting import MAX_ROUNDS, fit_cycle

jobs = st.lists(
    st.tuples(
        st.floats(20, 600),
        st.floats(20, 600),
        st.floats(0, 20),
        st.integers(0, 3),
        st.floats(1.0, 2.5),
        st.integers(3, 400),
        st.booleans(),
    ),
    min_size=2,
    max_size=4,
)


def overlaps(windows: list[tuple[float, float]], period_s: float) -> bool:
    """Whether two windows of a ring meet."""
    cut = sorted((start % period_s, length) for start, length in windows)
    for i, (start, length) in enumerate(cut):
        following = cut[(i + 1) % len(cut)][0] + (period_s if i + 1 == len(cut) else 0)
        if start + length > following + 1e-3:
            return True
    return False


@settings(max_examples=250, deadline=None)
@given(jobs)
def test_every_fitted_cycle_is_a_valid_schedule(
    drawn: list[tuple[float, float, float, int, float, int, bool]],
) -> None:
    count = len(drawn)
    work: Floats = np.zeros((WORK_ROWS, count))
    pins = np.array([job[3] for job in drawn], np.int64)
    for index, (roll, train, sync, _, slo, left, capped) in enumerate(drawn):
        work[ROLL_S, index], work[TRAIN_S, index], work[SYNC_S, index] = roll, train, sync
        work[LEFT, index], work[BUDGET_S, index] = left, slo * left * (roll + train + sync)
        work[CAP_S, index] = slo * (roll + train + sync) if capped else np.inf
    starts = np.zeros((count, 2, MAX_ROUNDS))
    period_s = fit_cycle(work, pins, count, starts, np.zeros(1, np.int64))
    if period_s == 0:
        return
    on_node: dict[int, list[tuple[float, float]]] = {}
    for index in range(count):
        rounds = int(work[ROUNDS, index])
        # Within its budget, even if a whole cycle and a phase are lost before the first iteration.
        lost_s = period_s + max(work[ROLL_S].max(), work[TRAIN_S].max())
        assert lost_s + work[LEFT, index] * period_s / rounds <= work[BUDGET_S, index] + 1e-3
        ready = starts[index, 0, 0]
        for turn in range(rounds):
            roll_at, train_at = starts[index, :, turn]
            assert roll_at >= ready - 1e-3
            assert train_at >= roll_at + work[ROLL_S, index] - 1e-3
            ready = train_at + work[TRAIN_S, index] + work[SYNC_S, index]
            for node in [n for n in range(8) if pins[index] >> n & 1] or [-1]:
                on_node.setdefault(node, []).append((roll_at, work[ROLL_S, index]))
            on_node.setdefault(-1, []).append((train_at, work[TRAIN_S, index]))
        assert ready <= starts[index, 0, 0] + period_s + 1e-3
    for windows in on_node.values():
        assert not overlaps(windows, period_s)
    for index, ends in enumerate(run_order(work, pins, period_s, starts)):
        settled = ends[10 * int(work[ROUNDS, index]) :]
        assert np.diff(settled).max() <= work[CAP_S, index] + 1e-3


def run_order(work: Floats, pins: Ints, period_s: float, starts: Floats) -> list[list[float]]:
    """When each job's iterations end if the cycle's order is kept, and its times are not."""
    slots = []
    for index in range(len(pins)):
        job = JobId(str(index))
        rollout = tuple(NodeId(str(n)) for n in range(8) if pins[index] >> n & 1)
        train = (NodeId("train"),)
        for roll_at, train_at in starts[index, :, : int(work[ROUNDS, index])].T:
            roll_s, train_s = work[ROLL_S, index], work[TRAIN_S, index]
            slots.append(PhaseSlot(job, Phase.ROLLOUT, rollout or train, roll_at, roll_s))
            slots.append(PhaseSlot(job, Phase.TRAIN, train, train_at, train_s))
    slots.sort(key=lambda slot: (slot.start_s, slot.job))
    syncs_s = {JobId(str(index)): float(work[SYNC_S, index]) for index in range(len(pins))}
    ends = run_plan(GroupPlan(period_s, tuple(slots)), syncs_s, cycles=20)
    return [ends[job] for job in syncs_s]


def test_a_short_job_runs_several_times_inside_a_long_ones_cycle() -> None:
    work = np.zeros((WORK_ROWS, 2))
    work[CAP_S] = np.inf
    work[ROLL_S], work[TRAIN_S] = [500, 30], [100, 30]
    work[LEFT] = 1000
    work[BUDGET_S] = [1.1 * 600 * 1000, 1.5 * 60 * 1000]
    starts = np.zeros((2, 2, MAX_ROUNDS))
    period_s = fit_cycle(work, np.array([1, 2], np.int64), 2, starts, np.zeros(1, np.int64))
    assert period_s > 0
    assert work[ROUNDS, 0] == 1
    assert work[ROUNDS, 1] >= 4


def test_a_job_without_time_to_spare_shares_with_nobody_who_would_delay_it() -> None:
    work = np.zeros((WORK_ROWS, 2))
    work[CAP_S] = np.inf
    work[ROLL_S], work[TRAIN_S] = [100, 100], [100, 300]
    work[LEFT] = 1000
    work[BUDGET_S] = [1.0 * 200 * 1000, 2.0 * 400 * 1000]
    starts, spent = np.zeros((2, 2, MAX_ROUNDS)), np.zeros(1, np.int64)
    assert fit_cycle(work, np.array([1, 2], np.int64), 2, starts, spent) == 0
