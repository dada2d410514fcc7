"""The meta-iteration that the kernel computes is the one that execution settles at."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from phase_execution import run_in_turn

from slackwater.policy.columns import (
    ROLL_S,
    SYNC_S,
    TRAIN_S,
    WORK_ROWS,
    Floats,
    Ints,
)
from slackwater.policy.ordering.round_robin_cycle import round_robin_period_s

# In steps of 5 s: a job whose own cycle is shorter than the others' by d runs ahead by d in every
# cycle until it meets their order, so that execution settles only after as many cycles as d fits
# into a meta-iteration.
phase_s = st.integers(1, 120).map(lambda fives: 5.0 * fives)
sync_s = st.integers(0, 8).map(lambda fives: 5.0 * fives)
members = st.lists(st.tuples(phase_s, phase_s, sync_s, st.integers(1, 7)), min_size=1, max_size=5)


def arrays(jobs: list[tuple[float, float, float, int]]) -> tuple[Floats, Ints]:
    work = np.zeros((WORK_ROWS, len(jobs)))
    for row, column in ((ROLL_S, 0), (TRAIN_S, 1), (SYNC_S, 2)):
        work[row] = [job[column] for job in jobs]
    return work, np.array([job[3] for job in jobs], np.int64)


@settings(max_examples=150, deadline=None)
@given(members)
def test_the_period_is_what_execution_settles_at(
    jobs: list[tuple[float, float, float, int]],
) -> None:
    work, pins = arrays(jobs)
    period_s = round_robin_period_s(work, pins, len(jobs))
    rolls, trains, syncs = ([job[i] for job in jobs] for i in range(3))
    ends = run_in_turn(rolls, trains, syncs, [job[3] for job in jobs], cycles=961)
    for times in ends:
        # The regime may repeat only every few cycles: 120 has all small ones as divisors.
        assert (times[960] - times[840]) / 120 == pytest.approx(period_s, rel=1e-6, abs=1e-4)


def test_a_job_that_is_slightly_faster_than_the_other_waits_in_the_end() -> None:
    jobs = [(244.0, 5.0, 0.0, 2), (90.0, 120.0, 40.0, 1)]
    period_s = round_robin_period_s(*arrays(jobs), 2)
    ends = run_in_turn([244.0, 90.0], [5.0, 120.0], [0.0, 40.0], [2, 1], cycles=961)
    assert period_s == pytest.approx(250)
    assert [(times[960] - times[840]) / 120 for times in ends] == pytest.approx([250, 250])


def test_two_jobs_that_complement_one_another_lose_nothing() -> None:
    work, pins = arrays([(100, 100, 0, 1), (100, 100, 0, 1)])
    assert round_robin_period_s(work, pins, 2) == pytest.approx(200)


def test_gangs_that_overlap_in_a_circle_take_longer_than_any_node_is_busy() -> None:
    work, pins = arrays([(100, 10, 0, 0b101), (100, 10, 0, 0b011), (100, 10, 0, 0b110)])
    assert round_robin_period_s(work, pins, 3) == pytest.approx(300)
