"""Pods whose constants are ours are what is left of the comparison."""

from benchmarks.actions.pod_ablation import pod_rules
from benchmarks.actions.simulated.cpu_run import CpuCluster, CpuRun
from benchmarks.actions.simulated.pods import PodRun
from benchmarks.actions.simulated.workload import CodingWorkload
from slackwater.control.actions.broker_state import BrokerSettings


def test_each_constant_of_ours_makes_pods_faster_and_all_of_them_make_them_equal() -> None:
    workload, cluster = CodingWorkload(turns_mean=4.0), CpuCluster(nodes=1, cores=32)
    batch = workload.draw(24, seed=0)
    ours = CpuRun(cluster, workload, BrokerSettings()).run(batch)
    means, makespans = {}, {}
    for name, rules in pod_rules(cluster).items():
        pods = PodRun(cluster, workload, rules).run(batch)
        means[name] = pods.mean_trajectory_s / ours.mean_trajectory_s
        makespans[name] = pods.finished_s / ours.finished_s
    published = means.pop("as_published")
    assert published > 1.2
    assert all(ratio < published for ratio in means.values())
    assert means["all_and_room_as_ours"] == min(means.values())
    assert 0.6 < means["all_and_room_as_ours"] < 1.2
    assert 0.8 < makespans["all_and_room_as_ours"] < 1.05
