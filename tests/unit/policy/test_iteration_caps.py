"""Caps on iterations where a cycle's order is run, and its times are not kept."""

import numpy as np
import pytest
from placement_cases import fleet, job

from slackwater.policy.columns import (
    BUDGET_S,
    CAP_S,
    LEFT,
    ROLL_S,
    ROUNDS,
    SYNC_S,
    TRAIN_S,
    WORK_ROWS,
)
from slackwater.policy.placement.cycle_fitting import MAX_ROUNDS, fit_cycle
from slackwater.policy.placement.interface import JobProgress
from slackwater.policy.placement.interleaving import Interleaving
from slackwater.policy.placement.iteration_caps import keeps_caps


@pytest.mark.parametrize(("cap_s", "kept"), [(np.inf, True), (1400.0, True), (1373.0, False)])
def test_an_iteration_that_ends_before_its_time_makes_the_next_one_longer(
    cap_s: float, kept: bool
) -> None:
    # One member makes two iterations per cycle, at most 1,163 s apart by its times. By the order
    # it makes both at once and then waits for the other's rollout on the node that they share.
    work = np.zeros((WORK_ROWS, 2))
    work[:, 0] = np.inf
    work[[ROLL_S, TRAIN_S, SYNC_S, ROUNDS, CAP_S], 0] = 520.0, 170.0, 0.0, 2, cap_s
    work[[ROLL_S, TRAIN_S, SYNC_S, ROUNDS, CAP_S], 1] = 870.0, 240.0, 0.0, 1, np.inf
    starts = np.zeros((2, 2, MAX_ROUNDS))
    starts[0, :, :2] = (420.0, 1117.0), (942.0, 1896.0)
    starts[1, :, 0] = 1640.0, 3231.0
    assert keeps_caps(work, np.array([1, 1]), 2, 2116.0, starts) is kept


def test_a_short_job_runs_more_often_where_it_would_wait_too_long_for_a_long_ones_turn() -> None:
    # Its budget asks for two iterations per cycle. By the order it makes them at once, and the next
    # one after the other's train phase takes 986 s.
    work = np.zeros((WORK_ROWS, 2))
    rows = [ROLL_S, TRAIN_S, SYNC_S, BUDGET_S, LEFT, CAP_S]
    work[rows, 0] = 900.0, 277.5, 25.6, 73612.0, 57.0, 1270.0
    work[rows, 1] = 109.4, 104.3, 0.0, 120000.0, 165.0, 731.0
    pins, starts = np.array([1, 0]), np.zeros((2, 2, MAX_ROUNDS))
    period_s = fit_cycle(work, pins, 2, starts, np.zeros(1, np.int64))
    assert list(work[ROUNDS]) == [1, 4]
    assert period_s > 0 and keeps_caps(work, pins, 2, period_s, starts)


def test_more_periods_are_tried_where_caps_refuse_those_with_the_most_room() -> None:
    work = np.zeros((WORK_ROWS, 2))
    work[[ROLL_S, TRAIN_S, BUDGET_S, LEFT, CAP_S], 0] = 130.0, 40.0, 20400.0, 100.0, 204.0
    work[[ROLL_S, TRAIN_S, BUDGET_S, LEFT, CAP_S], 1] = 120.0, 110.0, 36800.0, 100.0, 368.0
    pins, starts = np.array([1, 2]), np.zeros((2, 2, MAX_ROUNDS))
    period_s = fit_cycle(work, pins, 2, starts, np.zeros(1, np.int64))
    assert period_s > 0 and keeps_caps(work, pins, 2, period_s, starts)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_credit_makes_iterations_longer_than_their_bound_only_where_lengths_are_short(
    share: float,
) -> None:
    # The first job has won so much time that its SLO would bear every other turn of the second.
    policy = Interleaving(fleet())
    first, second = job("first", 100, 100, 1.4), job("second", 260, 250, 1.02)
    policy.place(first, 0.0)
    policy.observe([JobProgress(first.job, 290, 1e6, 100 * share, 100 * share)])
    policy.place(second, 0.0)
    members = policy.registry.members
    shared = members[first.job].row == members[second.job].row
    assert shared == (share == 0.5)


def test_a_job_of_which_nothing_was_seen_is_taken_to_be_like_the_others() -> None:
    known, new = job("known", 100, 100, 1.5), job("new", 100, 100, 1.5)
    policy = Interleaving(fleet())
    policy.place(known, 0.0)
    # At their worst its phases take as long as declared, which is with a switch of 0.42 s each.
    for rollout_s, train_s, cap_s in (
        (None, None, np.inf),
        (99.58, 99.58, 300.0),
        (80.58, 80.58, 300 / 0.81 ** (1 / 3)),
        (50.0, 50.0, np.inf),
    ):
        policy.observe([JobProgress(known.job, 290, 1e6, rollout_s, train_s)])
        assert policy.registry.cap_s(new) == pytest.approx(cap_s)
