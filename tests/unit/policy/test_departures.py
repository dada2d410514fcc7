"""When a member leaves, those that stay run as fast as the book says, and costs are counted by
that.
"""

import numpy as np
import pytest
from phase_execution import run_plan
from placement_cases import drawn_jobs, fleet

from slackwater.policy.columns import (
    LEFT,
    ROLL_S,
    ROUNDS,
    TRAIN_S,
    WORK_ROWS,
    Floats,
)
from slackwater.policy.placement.consolidation import LEAST_GAIN_H, LEAST_GAP_S
from slackwater.policy.placement.cycle_fitting import busiest_s, drain_cost
from slackwater.policy.placement.interleaving import Interleaving


@pytest.mark.parametrize("seed", range(6))
def test_after_departures_a_group_runs_at_the_pace_that_the_book_has(seed: int) -> None:
    policy = Interleaving(fleet())
    specs = drawn_jobs(seed, 36)
    for spec in specs:
        policy.place(spec, 0.0)
        policy.rebalance(0.0)
    draw = np.random.default_rng(seed)
    for number in draw.permutation(len(specs))[:12]:
        policy.remove(specs[number].job)
        policy.rebalance(0.0)
    shared = 0
    for row, group in policy.book.groups.items():
        if len(group.jobs) == 1:
            continue
        shared += 1
        assert group.plan is not None
        members = {name: policy.book.members[name] for name in group.jobs}
        sync = {n: m.spec.profile.sync_s if m.pins else 0.0 for n, m in members.items()}
        ends = run_plan(group.plan, sync, cycles=61)
        for name, times in ends.items():
            rounds = group.plan.rounds(name)
            executed_s = (times[-1] - times[20 * rounds - 1]) / 41
            assert executed_s <= policy.book.table.cycle_s[row] * 1.02
    assert shared >= 3


def work_of(*jobs: tuple[float, float, float]) -> Floats:
    work = np.zeros((WORK_ROWS, len(jobs)))
    for index, (roll_s, train_s, left) in enumerate(jobs):
        work[ROLL_S, index], work[TRAIN_S, index], work[LEFT, index] = roll_s, train_s, left
    work[ROUNDS] = 1
    return work


def cost_of(work: Floats, pins: list[int]) -> float:
    count = work.shape[1]
    pinned = np.array(pins, np.int64)
    cycle_s = busiest_s(work, pinned, count)
    return float(drain_cost(work, pinned, count, cycle_s, np.zeros(count), 1, 10.0, 40.0))


def test_those_that_stay_are_faster_once_a_short_job_is_done() -> None:
    # Ten cycles of 400 s together on one rollout node, then ninety of 300 s alone.
    work = work_of((200.0, 100.0, 100.0), (200.0, 100.0, 10.0))
    assert cost_of(work, [1, 1]) == pytest.approx((10 * 400 + 90 * 300) * 50 / 3600)


def test_a_rollout_node_is_paid_for_until_its_last_job_is_done() -> None:
    work = work_of((200.0, 100.0, 100.0), (200.0, 100.0, 10.0))
    assert cost_of(work, [1, 2]) == pytest.approx(
        (100 * 300 * 40 + 100 * 300 * 10 + 10 * 300 * 10) / 3600
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_job_that_was_moved_rests_and_no_move_is_for_a_trifle(seed: int) -> None:
    policy = Interleaving(fleet())
    specs = drawn_jobs(seed, 30)
    draw, now_s = np.random.default_rng(seed), 0.0
    moved: dict[str, list[float]] = {}
    for step in range(120):
        now_s += float(draw.exponential(300.0))
        placed = list(policy.book.members)
        if step < len(specs):
            policy.place(specs[step], now_s)
            policy.rebalance(now_s)
        elif placed and draw.random() < 0.3:
            policy.remove(placed[int(draw.integers(len(placed)))])
            policy.rebalance(now_s)
        for name, member in policy.book.members.items():
            if member.moved_s == now_s:
                moved.setdefault(name, []).append(now_s)
                saved = float(member.reason.rpartition("$")[2])
                group = policy.book.groups[member.row]
                worth = policy.book.worth_per_h(0, len(group.train))
                assert saved >= LEAST_GAIN_H * worth - 1.0
    assert moved, "nobody was ever moved"
    for times in moved.values():
        assert min(np.diff(times), default=LEAST_GAP_S) >= LEAST_GAP_S
