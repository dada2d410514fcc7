"""Group placement follows Algorithm 1: pack, scale, isolate; prune saturated groups; least cost,
then most slack.
"""

import numpy as np
import pytest
from placement_cases import drawn_jobs, fleet, job

from benchmarks.coscheduling.optimal_placement import best_grouping
from slackwater.model.placement import Placement, Strategy
from slackwater.policy.placement.group_packing import GroupPlacement


def placed(policy: GroupPlacement, *jobs: tuple[str, float, float, float]) -> list[Placement]:
    answers = [policy.place(job(*each), 0.0) for each in jobs]
    assert all(isinstance(answer, Placement) for answer in answers)
    return answers  # type: ignore[return-value]


def test_complementary_jobs_are_packed_onto_nodes_that_are_paid_for() -> None:
    first, second = placed(GroupPlacement(fleet()), ("a", 100, 100, 1.1), ("b", 100, 100, 1.1))
    assert first.strategy is Strategy.ISOLATE
    assert second.strategy is Strategy.PACK
    assert second.rollout_nodes == first.rollout_nodes


def test_rollout_heavy_jobs_share_train_nodes_and_get_rollout_nodes_of_their_own() -> None:
    first, second = placed(GroupPlacement(fleet()), ("a", 400, 100, 1.1), ("b", 400, 100, 1.1))
    assert second.strategy is Strategy.SCALE
    assert second.train_nodes == first.train_nodes
    assert second.rollout_nodes != first.rollout_nodes


def test_a_saturated_group_takes_nobody_even_if_every_bound_would_hold() -> None:
    a, b, c = placed(
        GroupPlacement(fleet()), ("a", 100, 100, 2.0), ("b", 100, 100, 2.0), ("c", 90, 90, 2.0)
    )
    assert a.group == b.group
    assert c.strategy is Strategy.ISOLATE


def test_a_bound_that_one_meta_iteration_would_break_keeps_jobs_apart() -> None:
    _, second = placed(GroupPlacement(fleet()), ("long", 400, 200, 1.5), ("short", 50, 50, 1.5))
    assert second.strategy is Strategy.ISOLATE


def test_memory_keeps_jobs_apart() -> None:
    policy = GroupPlacement(fleet())
    for name in ("a", "b"):
        policy.place(job(name, 100, 100, 1.5, train_state_gb=1100.0), 0.0)
    assert len(policy.registry.groups) == 2


def test_the_largest_group_is_respected() -> None:
    policy = GroupPlacement(fleet(), max_group_size=2)
    for name in ("a", "b", "c", "d"):
        policy.place(job(name, 300, 30, 1.9), 0.0)
    assert sorted(len(group.jobs) for group in policy.registry.groups.values()) == [2, 2]


def test_a_job_of_more_train_nodes_scales_to_the_group_it_joins() -> None:
    policy = GroupPlacement(fleet())
    policy.place(job("small", 300, 60, 1.5), 0.0)
    wide = policy.place(job("wide", 300, 40, 1.5, train_nodes=2), 0.0)
    assert isinstance(wide, Placement)
    assert len(wide.train_nodes) == 1


@pytest.mark.parametrize("seed", range(4))
def test_no_grouping_under_the_same_rules_is_cheaper_than_the_optimum(seed: int) -> None:
    jobs = [spec for spec in drawn_jobs(seed, 12) if spec.profile.rollout_nodes == 1][:5]
    best = sum(draft.cost for draft in best_grouping(jobs, fleet()))
    draw = np.random.default_rng(seed)
    for _ in range(10):
        policy = GroupPlacement(fleet())
        for index in draw.permutation(len(jobs)):
            policy.place(jobs[index], 0.0)
        assert best <= _drained(policy) + 1e-6


def _drained(policy: GroupPlacement) -> float:
    from benchmarks.coscheduling.optimal_placement import drained_cost

    table, total = policy.registry.table, 0.0
    for row, group in policy.registry.groups.items():
        count = len(group.jobs)
        work, pins = table.work[row][:, :count].copy(), table.pins[row, :count].copy()
        total += drained_cost(work, pins, len(group.train), policy.fleet)
    return total
