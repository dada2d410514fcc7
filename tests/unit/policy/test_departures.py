"""When a member leaves, those that stay run as fast as the book says, and costs are counted by
that.
"""

from dataclasses import replace

import numpy as np
import pytest
from phase_execution import run_plan
from placement_cases import drawn_jobs, fleet, job

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Placement
from slackwater.policy.columns import (
    LEFT,
    ROLL_S,
    ROUNDS,
    TRAIN_S,
    WORK_ROWS,
    Floats,
)
from slackwater.policy.placement import interleaving, merging
from slackwater.policy.placement.consolidation import (
    MIN_GAIN,
    MIN_GAIN_H,
    MIN_MOVE_GAP_S,
    MIN_PARTIAL_GAIN,
    Merger,
)
from slackwater.policy.placement.cycle_fitting import drain_cost, min_cycle_s
from slackwater.policy.placement.groups import GroupRegistry
from slackwater.policy.placement.interface import JobProgress
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
    for row, group in policy.registry.groups.items():
        if len(group.jobs) == 1:
            continue
        shared += 1
        assert group.plan is not None
        members = {name: policy.registry.members[name] for name in group.jobs}
        sync = {n: m.spec.profile.sync_s if m.pins else 0.0 for n, m in members.items()}
        ends = run_plan(group.plan, sync, cycles=61)
        for name, times in ends.items():
            rounds = group.plan.rounds(name)
            executed_s = (times[-1] - times[20 * rounds - 1]) / 41
            assert executed_s <= policy.registry.table.cycle_s[row] * 1.02
    assert shared >= 3


def longest_iterations(policy: Interleaving) -> list[float]:
    """Of every job that shares nodes, over its bound, where its group's plan is run at worst-case
    lengths.
    """
    shares: list[float] = []
    for group in policy.registry.groups.values():
        if len(group.jobs) == 1:
            continue
        assert group.plan is not None
        members = {name: policy.registry.members[name] for name in group.jobs}
        sync = {n: m.spec.profile.sync_s if m.pins else 0.0 for n, m in members.items()}
        for name, times in run_plan(group.plan, sync, cycles=40).items():
            settled = times[20 * group.plan.rounds(name) :]
            shares.append(max(np.diff(settled)) / members[name].spec.iteration_bound_s)
    return shares


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_keeps_bounded_iterations_when_its_order_is_run_and_when_members_leave(
    seed: int,
) -> None:
    policy = Interleaving(fleet())
    specs = [replace(spec, slo_scope="iteration") for spec in drawn_jobs(seed, 60)]
    for spec in specs:
        policy.place(spec, 0.0)
        policy.rebalance(0.0)
    longest = longest_iterations(policy)
    assert len(longest) > 10 and max(longest) < 1 + 1e-6
    draw = np.random.default_rng(seed)
    for number in draw.permutation(len(specs))[:30]:
        policy.remove(specs[number].job)
        policy.rebalance(0.0)
        assert max(longest_iterations(policy)) < 1 + 1e-6


def work_of(*jobs: tuple[float, float, float]) -> Floats:
    work = np.zeros((WORK_ROWS, len(jobs)))
    for index, (roll_s, train_s, left) in enumerate(jobs):
        work[ROLL_S, index], work[TRAIN_S, index], work[LEFT, index] = roll_s, train_s, left
    work[ROUNDS] = 1
    return work


def cost_of(work: Floats, pins: list[int]) -> float:
    count = work.shape[1]
    pinned = np.array(pins, np.int64)
    cycle_s = min_cycle_s(work, pinned, count)
    return float(drain_cost(work, pinned, count, cycle_s, np.zeros(count), (1, 10.0, 40.0)))


def test_those_that_stay_are_faster_once_a_short_job_is_done() -> None:
    # Ten cycles of 400 s together on one rollout node, then ninety of 300 s alone.
    work = work_of((200.0, 100.0, 100.0), (200.0, 100.0, 10.0))
    assert cost_of(work, [1, 1]) == pytest.approx((10 * 400 + 90 * 300) * 50 / 3600)


def test_a_rollout_node_is_paid_for_until_its_last_job_is_done() -> None:
    work = work_of((200.0, 100.0, 100.0), (200.0, 100.0, 10.0))
    assert cost_of(work, [1, 2]) == pytest.approx(
        (100 * 300 * 40 + 100 * 300 * 10 + 10 * 300 * 10) / 3600
    )


@pytest.mark.parametrize("seed", range(1, 4))
def test_a_job_that_was_moved_rests_and_no_move_is_for_a_trifle(seed: int) -> None:
    policy = Interleaving(fleet())
    specs = drawn_jobs(seed, 30)
    draw, now_s = np.random.default_rng(seed), 0.0
    moved: dict[JobId, list[float]] = {}
    for step in range(120):
        now_s += float(draw.exponential(300.0))
        placed, moves = list(policy.registry.members), list[Placement]()
        if step < len(specs):
            policy.place(specs[step], now_s)
            while policy.next_rebalance_s(specs[step].profile, now_s) == now_s:  # a look goes on
                moves += policy.rebalance(now_s)
            moved[specs[step].job] = [now_s]
        elif placed and draw.random() < 0.3:
            policy.remove(placed[int(draw.integers(len(placed)))])
            moves = [*policy.rebalance(now_s)]
        for name in {move.job for move in moves}:
            member = policy.registry.members[name]
            if name in placed and member.moved_s == now_s:
                moved[name].append(now_s)
                saved = float(member.reason.rpartition("$")[2])
                group = policy.registry.groups[member.row]
                worth = policy.registry.worth_per_h(0, len(group.train))
                after = policy._consolidation.group_cost(member.row)
                assert saved >= MIN_GAIN_H * worth + MIN_GAIN * after - 1.0
    assert any(len(times) > 1 for times in moved.values()), "nobody was ever moved"
    for times in moved.values():
        assert min(np.diff(times), default=MIN_MOVE_GAP_S) >= MIN_MOVE_GAP_S


def test_a_merger_that_frees_no_group_must_save_more(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[tuple[bool, float]] = []
    policy = Interleaving(fleet())

    def record(registry: GroupRegistry, merger: Merger, now_s: float) -> list[JobId]:
        groups = {registry.members[name].row for name in merger.jobs}
        before = sum(policy._consolidation.group_cost(row) for row in groups)
        count = len(registry.groups)
        moved = execute_merger(registry, merger, now_s)
        saved.append((len(registry.groups) < count, merger.gain / before))
        return moved

    execute_merger = merging.execute_merger
    monkeypatch.setattr(interleaving, "execute_merger", record)
    for seed in (6, 18, 28):
        policy = Interleaving(fleet())
        specs = drawn_jobs(seed, 30)
        draw, now_s = np.random.default_rng(seed), 0.0
        for step in range(120):
            now_s += float(draw.exponential(300.0))
            placed = list(policy.registry.members)
            if step < len(specs):
                policy.place(specs[step], now_s)
                policy.rebalance(now_s)
            elif placed and draw.random() < 0.3:
                policy.remove(placed[int(draw.integers(len(placed)))])
            policy.rebalance(now_s)
    assert {freed for freed, _ in saved} == {True, False}
    for freed, share in saved:
        assert share >= (MIN_GAIN if freed else MIN_PARTIAL_GAIN)


@pytest.mark.parametrize(("iterations", "moves"), [(100, True), (300, False)])
def test_a_job_left_alone_gives_up_its_rollout_node_only_if_it_ends_soon(
    iterations: int, moves: bool
) -> None:
    """They take 11 h and 33 h: alone it would be cheaper on its train node in both cases."""
    policy = Interleaving(fleet())
    for name in ("stays", "leaves"):
        policy.place(replace(job(name, 200, 200, slo=2.0), iterations=iterations), 0.0)
        policy.rebalance(0.0)
    assert policy.registry.members[JobId("stays")].pins
    policy.remove(JobId("leaves"))
    assert bool(policy.rebalance(MIN_MOVE_GAP_S + 1)) is moves


@pytest.mark.parametrize("seed", range(3))
def test_a_job_that_may_not_move_stays_while_others_come_to_it(seed: int) -> None:
    policy = Interleaving(fleet())
    fixed: dict[JobId, tuple[NodeId, ...]] = {}
    moved = 0
    for number, spec in enumerate(drawn_jobs(seed, 40)):
        now_s = number * MIN_MOVE_GAP_S
        policy.place(spec, now_s)
        while policy.next_rebalance_s(spec.profile, now_s) == now_s:  # a look goes on
            moved += len({move.job for move in policy.rebalance(now_s)} - fixed.keys() - {spec.job})
        for job_id, nodes in fixed.items():
            placed = policy.registry.placement(job_id)
            assert (*placed.rollout_nodes, *placed.train_nodes) == nodes
        if number % 2:
            placed = policy.registry.placement(spec.job)
            fixed[spec.job] = (*placed.rollout_nodes, *placed.train_nodes)
        left = [(j, m.left, m.budget_s) for j, m in policy.registry.members.items()]
        policy.observe([JobProgress(*one, may_move=one[0] not in fixed) for one in left])
    groups = policy.registry.groups.values()
    shared = sum(len(group.jobs) > 1 and bool(fixed.keys() & group.jobs) for group in groups)
    assert moved and shared


def test_jobs_that_rested_when_they_were_looked_at_are_looked_at_again() -> None:
    tight, other = job("tight", 300, 100, slo=1.0), job("other", 300, 100, slo=1.9)
    policy = Interleaving(replace(fleet(), engines_on_train_nodes=False))
    for now_s, spec in ((0.0, tight), (10.0, other)):
        policy.place(spec, now_s)
        assert not policy.rebalance(now_s)
    # The tight one ran twice as fast as it declared, so that it now has time for the other.
    policy.observe(
        [
            JobProgress(tight.job, 150, 300 * 400 * 0.75),
            JobProgress(other.job, 300, 1.9 * 300 * 400),
        ]
    )
    policy.place(job("third", 300, 100, slo=1.0), MIN_MOVE_GAP_S + 10)
    assert {move.job for move in policy.rebalance(MIN_MOVE_GAP_S + 10)} & {tight.job, other.job}
    assert policy.registry.members[tight.job].row == policy.registry.members[other.job].row
