"""Hourly regrouping: cheaper groupings are taken up, and no one moves for nothing."""

import numpy as np
from scheduler_stage import fleet, job

from slackwater.model.ids import JobId
from slackwater.model.job import JobSpec
from slackwater.model.placement import Placement
from slackwater.policy.placement.regrouping import Regrouping


def placed(policy: Regrouping, *specs: JobSpec) -> dict[JobId, Placement]:
    found = {}
    for spec in specs:
        placement = policy.place(spec, spec.arrival_s)
        assert isinstance(placement, Placement)
        found[spec.job] = placement
    return found


def random_jobs(seed: int, count: int) -> list[JobSpec]:
    generator = np.random.default_rng(seed)
    return [
        job(
            f"j{number}",
            float(generator.uniform(30, 500)),
            float(generator.uniform(30, 500)),
            slo=float(generator.uniform(1, 2)),
            iterations=500,
            nodes=int(generator.integers(1, 3)),
        )
        for number in range(count)
    ]


def test_before_the_hour_nothing_moves() -> None:
    policy = Regrouping(fleet(64, 64), 5, 3600.0, 8, 0)
    placed(policy, *random_jobs(1, 12))
    assert policy.rebalance(3599.0) == ()


def test_a_grouping_that_is_taken_up_costs_less_and_names_every_move() -> None:
    moved = 0
    for seed in range(6):
        policy = Regrouping(fleet(64, 64), 5, 3600.0, 24, seed)
        before = placed(policy, *random_jobs(seed, 14))
        cost = policy.hourly_cost()
        moves = {move.job: move for move in policy.rebalance(3600.0)}
        policy.check_integrity()
        assert policy.hourly_cost() < cost or not moves
        for name, old in before.items():
            new = policy.registry.placement(old.job)
            same = (new.rollout_nodes, new.train_nodes) == (old.rollout_nodes, old.train_nodes)
            assert same != (name in moves), f"{name} moved without a word"
        moved += len(moves)
    assert moved > 0


def test_the_hour_starts_anew_after_each_look() -> None:
    policy = Regrouping(fleet(64, 64), 5, 3600.0, 8, 0)
    placed(policy, *random_jobs(2, 10))
    policy.rebalance(3600.0)
    assert policy.rebalance(7199.0) == ()
