"""Baselines as strong as their papers leave them: grouping that may co-locate, a horizon over
lengths that were seen, and regrouping and co-location that keep every SLO.
"""

from placement_cases import fleet, job

from slackwater.model.node import H20, H800, Pool, Role
from slackwater.model.placement import Placement, Strategy
from slackwater.policy.placement.catalogue import make_policy
from slackwater.policy.placement.horizon import HorizonPlacement
from slackwater.policy.placement.interface import JobProgress
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.cluster.workload import ProductionWorkload, ProfileWorkload


def test_a_job_that_no_group_takes_has_train_nodes_alone_where_that_costs_less() -> None:
    for slo, strategy in ((2.0, Strategy.COLOCATE), (1.05, Strategy.ISOLATE)):
        placed = make_policy("group", fleet(), {"colocate": 1}).place(
            job("a", 100, 100, slo), now_s=0.0
        )
        assert isinstance(placed, Placement)
        assert placed.strategy is strategy
        apart = make_policy("group", fleet()).place(job("a", 100, 100, slo), now_s=0.0)
        assert isinstance(apart, Placement)
        assert apart.strategy is Strategy.ISOLATE


def test_jobs_share_a_train_node_by_the_lengths_that_were_seen() -> None:
    """By what they declared each would fill more than half of the train node."""
    policy = HorizonPlacement(fleet(), profiled=True)
    for name in ("a", "b"):
        policy.place(job(name, 200, 400, 1.1), 0.0)
    assert len(policy.registry.groups) == 2
    policy.observe([JobProgress(job("a", 1, 1).job, 299, 1e6)])
    assert not policy.rebalance(0.0)  # nothing was seen yet
    policy.observe([JobProgress(job(name, 1, 1).job, 290, 1e6, 200.0, 50.0) for name in ("a", "b")])
    moved = policy.rebalance(0.0)
    assert len(moved) == 1
    assert len(policy.registry.groups) == 1
    policy.check_integrity()


def test_regrouping_swaps_jobs_on_a_fleet_without_spare_nodes() -> None:
    pools = (Pool(Role.ROLLOUT, H20, 5), Pool(Role.TRAIN, H800, 4))
    scenario = ClusterScenario(
        fleet=pools,
        workload=ProductionWorkload(jobs=16, span_s=43_200.0, mean_duration_s=14_400.0),
        policy=PolicyConfig(name="regrouping", regroup_every_s=1800.0),
    )
    report = simulate(scenario)
    assert report.finished == 16
    assert report.moves > 0
    assert report.train.peak_nodes == 4


def test_a_job_is_co_located_where_its_slo_bears_that() -> None:
    for slo, strategy in ((2.0, Strategy.COLOCATE), (1.05, Strategy.ISOLATE)):
        policy = make_policy("colocated", fleet(), {"keep_slos": 1})
        placed = policy.place(job("a", 100, 100, slo), now_s=0.0)
        assert isinstance(placed, Placement)
        assert placed.strategy is strategy


def test_regrouping_that_keeps_slos_moves_only_jobs_that_can_pay_for_the_restart() -> None:
    # Jobs of an hour: a restart takes much of what their SLO leaves.
    workload = ProfileWorkload(jobs=60, span_s=86_400.0, mean_duration_s=3_600.0, mix="balanced")
    kept = {}
    for keep_slos in (0, 1):
        options = {"keep_slos": keep_slos}
        policy = PolicyConfig(name="regrouping", regroup_every_s=3600.0, options=options)
        report = simulate(ClusterScenario(workload=workload, policy=policy))
        kept[keep_slos] = report.slo_attainment
        assert report.moves > 0
    assert kept[0] < kept[1] == 1.0
