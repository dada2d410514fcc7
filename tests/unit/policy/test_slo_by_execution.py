"""Placements keep every job's bound when they are run, at worst-case lengths and at drawn shorter
ones.
"""

import numpy as np
import pytest
from phase_execution import Length, run_in_turn, run_plan
from placement_cases import drawn_jobs, fleet, job

from slackwater.model.ids import JobId
from slackwater.model.placement import Phase, Strategy
from slackwater.policy.columns import ROLL_S, SYNC_S, TRAIN_S
from slackwater.policy.placement.consolidation import MIN_MOVE_GAP_S
from slackwater.policy.placement.group_packing import GroupPlacement
from slackwater.policy.placement.interface import JobProgress
from slackwater.policy.placement.interleaving import Interleaving


def shorter(seed: int) -> Length:
    draw = np.random.default_rng(seed)

    def length(job: JobId, phase: Phase, length_s: float) -> float:
        del job, phase
        return length_s * float(draw.uniform(0.3, 1.0))

    return length


@pytest.mark.parametrize("seed", range(6))
def test_groups_in_turn_keep_every_bound(seed: int) -> None:
    policy = GroupPlacement(fleet())
    for spec in drawn_jobs(seed, 40):
        policy.place(spec, 0.0)
    draw = np.random.default_rng(seed)
    shared = 0
    for row, group in policy.registry.groups.items():
        count = len(group.jobs)
        shared += count > 1
        work, pins = policy.registry.table.work[row], policy.registry.table.pins[row]
        roll_s, train_s, sync_s = (work[r, :count].tolist() for r in (ROLL_S, TRAIN_S, SYNC_S))
        pinned = pins[:count].tolist()
        for share in (lambda: 1.0, lambda: float(draw.uniform(0.3, 1.0))):
            ends = run_in_turn(roll_s, train_s, sync_s, pinned, cycles=200, share=share)
            for name, times in zip(group.jobs, ends, strict=True):
                spec = policy.registry.members[name].spec
                assert times[-1] <= spec.slo * 200 * spec.profile.solo_s + spec.profile.solo_s
                settled_s = (times[-1] - times[80]) / 119
                assert settled_s <= spec.slo * spec.profile.solo_s * (1 + 1e-6)
    assert shared >= 5


@pytest.mark.parametrize("seed", range(6))
def test_planned_cycles_bring_every_job_home_within_its_budget(seed: int) -> None:
    policy = Interleaving(fleet())
    for spec in drawn_jobs(seed, 40):
        policy.place(spec, 0.0)
        policy.rebalance(0.0)
    shared = 0
    for group in policy.registry.groups.values():
        assert group.plan is not None
        shared += len(group.jobs) > 1
        members = {name: policy.registry.members[name] for name in group.jobs}
        sync = {n: m.spec.profile.sync_s if m.pins else 0.0 for n, m in members.items()}
        cycles = max(
            -(-m.spec.iterations // group.plan.rounds(name)) for name, m in members.items()
        )
        for length in (None, shorter(seed)):
            ends = run_plan(group.plan, sync, cycles, *([] if length is None else [length]))
            for name, member in members.items():
                spec = member.spec
                done_s = ends[name][spec.iterations - 1]
                assert done_s <= spec.slo * spec.iterations * spec.profile.solo_s * (1 + 1e-9)
    assert shared >= 4


def test_a_short_job_shares_with_a_long_one_where_one_turn_each_could_not() -> None:
    long, short = job("long", 500, 100, slo=1.1), job("short", 40, 40, slo=1.6)
    in_turn, many_rates = GroupPlacement(fleet()), Interleaving(fleet())
    for policy in (in_turn, many_rates):
        policy.place(long, 0.0)
        policy.place(short, 0.0)
        policy.rebalance(0.0)
    assert len(in_turn.registry.groups) == 2
    assert len(many_rates.registry.groups) == 1
    assert many_rates.hourly_cost() < in_turn.hourly_cost()


def test_time_that_a_job_did_not_need_is_credit_for_sharing() -> None:
    tight, other = job("tight", 300, 100, slo=1.0), job("other", 300, 100, slo=1.9)
    policy = Interleaving(fleet())
    for now_s, spec in ((0.0, tight), (10.0, other)):
        policy.place(spec, now_s)
        assert not policy.rebalance(now_s)
    assert len(policy.registry.groups) == 2
    # It ran twice as fast as it declared: half its iterations are left, and three quarters of its
    # time.
    policy.observe(
        [
            JobProgress(tight.job, 150, 300 * 400 * 0.75),
            JobProgress(other.job, 300, 1.9 * 300 * 400),
        ]
    )
    assert policy.rebalance(MIN_MOVE_GAP_S + 10.0)
    assert len(policy.registry.groups) == 1
    policy.check_integrity()


def test_a_lone_job_uses_the_train_nodes_own_bubbles_if_its_bound_allows() -> None:
    policy = Interleaving(fleet())
    loose = policy.place(job("loose", 200, 200, slo=1.5), 0.0)
    tight = policy.place(job("tight", 200, 200, slo=1.0), 0.0)
    assert loose.strategy is Strategy.COLOCATE  # type: ignore[union-attr]
    assert loose.rollout_nodes == loose.train_nodes  # type: ignore[union-attr]
    assert tight.strategy is Strategy.ISOLATE  # type: ignore[union-attr]


def test_an_isolated_job_leaves_the_others_their_plan() -> None:
    policy = Interleaving(fleet())
    for name in ("a", "b"):
        policy.place(job(name, 200, 200, slo=1.9), 0.0)
        policy.rebalance(0.0)
    assert len(policy.registry.groups) == 1
    (move,) = policy.isolate(JobId("a"), 0.0)
    assert move.job == "a"
    assert move.plan is not None and {slot.job for slot in move.plan.slots} == {"a"}
    (other,) = [group for group in policy.registry.groups.values() if "b" in group.jobs]
    assert other.plan is not None and {slot.job for slot in other.plan.slots} == {"b"}
    policy.check_integrity()


def test_an_isolated_job_is_not_moved_back_in_the_same_instant() -> None:
    policy, now_s = Interleaving(fleet()), 5000.0
    jobs = [job(name, 100, 100, 1.8) for name in ("a", "b")]
    for spec in jobs:
        policy.place(spec, 0.0)
    progress = [JobProgress(spec.job, 250, 1e6, 100.0, 100.0) for spec in jobs]
    policy.observe(progress)
    policy.isolate(JobId("a"), now_s)
    policy.observe(progress)
    assert [move.job for move in policy.rebalance(now_s)] == ["b"]
