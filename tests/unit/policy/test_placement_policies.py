"""What every placement policy owes: budgets, limits, determinism, refusals with a reason, and
departures that leave nothing behind.
"""

import numpy as np
import pytest
from placement_cases import drawn_jobs, fleet, job

from slackwater.model.errors import ConfigError
from slackwater.model.ids import JobId
from slackwater.model.placement import Placement, Refusal
from slackwater.policy.placement.catalogue import POLICIES, make_policy
from slackwater.policy.placement.interface import JobProgress, PlacementPolicy

EVERY = tuple(name for name in POLICIES if name != "regrouping")


def come_and_go(policy: PlacementPolicy, seed: int, jobs: int = 40) -> list[object]:
    """Arrivals, departures and progress in a drawn order; everything that the policy answered."""
    draw = np.random.default_rng(seed)
    placed: dict[JobId, tuple[int, float]] = {}
    answers: list[object] = []
    for spec in drawn_jobs(seed, jobs):
        while placed and draw.random() < 0.4:
            leaver = list(placed)[int(draw.integers(len(placed)))]
            del placed[leaver]
            policy.remove(leaver)
            policy.check_integrity()
            answers.extend(policy.rebalance(0.0))
        progress = []
        for name, (left, budget_s) in placed.items():
            done = int(left * draw.uniform(0, 0.3))
            placed[name] = (max(left - done, 1), budget_s * (1 - done / left))
            progress.append(JobProgress(name, *placed[name]))
        policy.observe(progress)
        answer = policy.place(spec, 0.0)
        answers.append(answer)
        if isinstance(answer, Placement):
            placed[spec.job] = (spec.iterations, spec.slo * spec.iterations * spec.profile.solo_s)
            policy.check_integrity()
        answers.extend(policy.rebalance(0.0))
        policy.check_integrity()
    for name in placed:
        policy.remove(name)
        policy.check_integrity()
    return answers


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("seed", [1, 2])
def test_budgets_and_limits_hold_while_jobs_come_and_go(name: str, seed: int) -> None:
    policy = make_policy(name, fleet(30, 20))
    come_and_go(policy, seed)
    assert list(policy.list_rented()) == []
    assert policy.hourly_cost() == 0


@pytest.mark.parametrize("name", EVERY)
def test_the_same_jobs_get_the_same_answers(name: str) -> None:
    first = come_and_go(make_policy(name, fleet(), seed=7), 5, jobs=25)
    assert come_and_go(make_policy(name, fleet(), seed=7), 5, jobs=25) == first


@pytest.mark.parametrize("name", EVERY)
def test_removing_the_last_arrival_undoes_its_placement(name: str) -> None:
    policy = make_policy(name, fleet())
    for spec in drawn_jobs(3, 8):
        policy.place(spec, 0.0)
    before = list(policy.list_rented())
    if isinstance(policy.place(job("late", 120, 120), 0.0), Placement):
        policy.remove(JobId("late"))
        policy.rebalance(0.0)
    # Ours may use the occasion to move others together: then it rents fewer nodes, never more.
    assert len(policy.list_rented()) <= len(before)
    if name not in ("interleaving", "ours"):
        assert list(policy.list_rented()) == before


@pytest.mark.parametrize(
    "name", [name for name in EVERY if name not in ("interleaving", "ours", "colocated")]
)
def test_a_job_that_can_never_fit_is_told_why(name: str) -> None:
    policy = make_policy(name, fleet(2, 2))
    wide = policy.place(job("wide", 100, 100, rollout_nodes=3), 0.0)
    assert isinstance(wide, Refusal) and wide.final
    assert "3 rollout nodes" in wide.reason
    heavy = policy.place(job("heavy", 100, 100, train_state_gb=5000), 0.0)
    assert isinstance(heavy, Refusal) and heavy.final
    assert "5000 GB" in heavy.reason
    assert list(policy.list_rented()) == []


@pytest.mark.parametrize("name", ["ours", "group", "horizon", "solo", "colocated"])
def test_a_job_waits_while_the_pool_is_empty_and_comes_in_when_another_leaves(name: str) -> None:
    policy = make_policy(name, fleet(1, 1))
    assert isinstance(policy.place(job("first", 300, 400, slo=1.0), 0.0), Placement)
    second = policy.place(job("second", 300, 400, slo=1.0), 0.0)
    assert isinstance(second, Refusal) and not second.final
    assert "1 of 1" in second.reason
    policy.remove(JobId("first"))
    assert isinstance(policy.place(job("second", 300, 400, slo=1.0), 0.0), Placement)


def test_an_unknown_policy_or_option_is_named() -> None:
    with pytest.raises(ConfigError, match="weave"):
        make_policy("weave", fleet())
    with pytest.raises(ConfigError, match="max_grop_size"):
        make_policy("group", fleet(), {"max_grop_size": 3})
    with pytest.raises(ConfigError, match=r"2\.5.*whole"):
        make_policy("ours", fleet(), {"max_group_size": 2.5})


def test_a_job_is_not_placed_twice() -> None:
    policy = make_policy("group", fleet())
    policy.place(job("one", 100, 100), 0.0)
    with pytest.raises(ConfigError, match="one"):
        policy.place(job("one", 100, 100), 0.0)
