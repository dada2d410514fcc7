"""Runs in virtual time: everybody comes to an end, the same seed gives the same times, and limits
hold.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.actions.simulated.baselines import FixedDegree
from benchmarks.actions.simulated.cpu_run import CpuCluster, CpuRun
from benchmarks.actions.simulated.elastic import ElasticScheduling
from benchmarks.actions.simulated.gpu_run import (
    BrokerRun,
    GpuCluster,
    RewardWorkload,
    serverless,
    static_services,
)
from benchmarks.actions.simulated.pods import PodRules, PodRun, fair_level
from benchmarks.actions.simulated.search_run import (
    WEB,
    SearchWorkload,
    with_broker,
    without_broker,
)
from benchmarks.actions.simulated.workload import CodingWorkload
from slackwater.control.actions.broker_state import BrokerSettings
from slackwater.model.action import Limit
from slackwater.policy.actions.scheduling import Scheduling

CLUSTER = CpuCluster(nodes=2, cores=16)
CODING = CodingWorkload(turns_mean=4.0, most_cores=8)


@pytest.mark.parametrize("policy", [ElasticScheduling(), FixedDegree(4)])
def test_every_action_of_every_trajectory_completes(policy: Scheduling) -> None:
    batch = CODING.draw(40, seed=1)
    times = CpuRun(CLUSTER, CODING, BrokerSettings(policy)).run(batch)
    assert len(times.by_trajectory) == 40
    assert sum(map(len, times.by_kind.values())) == sum(map(len, batch))
    assert times.failed == 0


def test_the_same_seed_gives_the_same_times() -> None:
    def once() -> dict[int, float]:
        run = CpuRun(CLUSTER, CODING, BrokerSettings(), known=False)
        return run.run(CODING.draw(30, seed=3)).by_trajectory

    assert once() == once()


def test_pods_wait_for_room_and_all_complete() -> None:
    batch = CODING.draw(40, seed=1)
    roomy = PodRun(CLUSTER, CODING, PodRules(per_node=40)).run(batch)
    tight = PodRun(CLUSTER, CODING, PodRules(per_node=5)).run(batch)
    assert len(roomy.by_trajectory) == len(tight.by_trajectory) == 40
    assert tight.mean_trajectory_s > roomy.mean_trajectory_s


@given(st.lists(st.integers(1, 4), min_size=1, max_size=30), st.integers(1, 40))
def test_fair_shares_fill_the_cores_and_no_more(most: list[int], cores: int) -> None:
    level = fair_level(most, cores)
    assert sum(min(level, each) for each in most) == pytest.approx(min(cores, sum(most)))


def test_rewards_on_gpus_complete_in_every_system() -> None:
    workload, cluster = RewardWorkload(services=4), GpuCluster(gpus=16)
    requests = workload.draw(120, seed=2)
    for times in (
        BrokerRun(cluster, workload).run(requests),
        static_services(cluster, workload, requests),
        serverless(cluster, workload, requests),
    ):
        assert len(times.by_trajectory) == 120
        fastest_s = min(r.work_s for r in requests) / workload.efficiency.speedup(8)
        assert min(times.by_trajectory.values()) >= fastest_s


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 20),
    st.floats(0.3, 5.0),
    st.one_of(st.none(), st.integers(1, 20)),
    st.integers(0, 1000),
)
def test_a_quota_is_never_exceeded_and_hardly_wasted(
    quota: int, window_s: float, at_once: int | None, seed: int
) -> None:
    workload = SearchWorkload(Limit(WEB, at_once, quota, window_s), seconds_mean=0.1)
    calls = [(0.0, seconds) for _, seconds in workload.draw(150, seed)]
    result = with_broker(workload, calls)
    assert len(result.granted_s) == 150
    assert result.most_in_a_window(window_s) <= quota
    if at_once is None:
        lasted_s = result.granted_s[-1] - result.granted_s[0] + window_s
        whole_windows = -(-150 // quota)
        assert lasted_s <= whole_windows * window_s * 1.001


def test_callers_who_try_again_fail_where_the_broker_waits() -> None:
    workload = SearchWorkload()
    calls = [(0.0, seconds) for _, seconds in workload.draw(1000, 0)]
    assert without_broker(workload, calls).times.failed > 0
    assert with_broker(workload, calls).times.failed == 0
