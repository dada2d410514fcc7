"""Action completion times over the broker and over its peers, and how fast it decides (ARL-Tangram
6.2 to 6.4).
"""

import time
from dataclasses import replace

import numpy as np

from benchmarks.actions.pod_ablation import TRACE, pod_ablation
from benchmarks.actions.simulated.baselines import FixedDegree
from benchmarks.actions.simulated.cpu_run import CpuCluster, CpuRun
from benchmarks.actions.simulated.elastic import ElasticScheduling
from benchmarks.actions.simulated.gpu_run import (
    BrokerRun,
    GpuCluster,
    RewardRequest,
    RewardWorkload,
    serverless,
    static_services,
)
from benchmarks.actions.simulated.pods import PodRules, PodRun
from benchmarks.actions.simulated.search_run import SearchWorkload, with_broker, without_broker
from benchmarks.actions.simulated.times import ActionTimes
from benchmarks.actions.simulated.workload import REWARD, TOOL, CodingWorkload, Step, traced
from benchmarks.options import BenchOptions
from slackwater.control.actions.broker_state import BrokerSettings
from slackwater.policy.actions.scheduling import Scheduling

BATCHES = (128, 256, 512, 1024, 1280, 1536)
Trajectories = list[tuple[Step, ...]]


def run(options: BenchOptions) -> dict[str, float]:
    """Ratios of mean completion times, peers over ours; times in seconds; decisions in
    milliseconds.
    """
    figures: dict[str, float] = {}
    figures |= _coding(options)
    figures |= _fixed_degrees(options)
    figures |= _services(options)
    figures |= _idle_services(options)
    figures |= _search(options)
    figures |= _loaded(options)
    figures |= pod_ablation(options)
    options.progress("done", 1.0)
    return figures


def _ours(
    cluster: CpuCluster, workload: CodingWorkload, batch: Trajectories, settings: BrokerSettings
) -> ActionTimes:
    return CpuRun(cluster, workload, settings, time.perf_counter).run(batch)


def _coding(options: BenchOptions) -> dict[str, float]:
    """A pod per trajectory against the broker, on 1,280 cores in five nodes."""
    workload, cluster = CodingWorkload(), CpuCluster()
    _ours(cluster, workload, workload.draw(16, options.seed), BrokerSettings())  # compile
    figures: dict[str, float] = {}
    for number, size in enumerate(BATCHES):
        options.progress(f"coding, batch {size}", 0.5 * number / len(BATCHES))
        batch = workload.draw(size // 8 if options.quick else size, options.seed)
        here = replace(cluster, cores=cluster.cores // 8) if options.quick else cluster
        rules = PodRules(per_node=PodRules().per_node // 8) if options.quick else PodRules()
        ours = _ours(here, workload, batch, BrokerSettings())
        pods = PodRun(here, workload, rules).run(batch)
        figures[f"pods_over_ours_{size}"] = pods.mean_trajectory_s / ours.mean_trajectory_s
        figures[f"ours_trajectory_s_{size}"] = ours.mean_trajectory_s
        if size >= 1280:  # Kubernetes's documented design point: 110 pods on a node
            dense = PodRun(here, workload, replace(rules, per_node=rules.per_node * 110 // 256))
            key = f"pods_of_110_a_node_over_ours_{size}"
            figures[key] = dense.run(batch).mean_trajectory_s / ours.mean_trajectory_s
        if size == 1280:
            figures |= _at_1280(options, here, workload, batch, ours, pods)
    return figures


def _at_1280(
    options: BenchOptions,
    cluster: CpuCluster,
    workload: CodingWorkload,
    batch: Trajectories,
    ours: ActionTimes,
    pods: ActionTimes,
) -> dict[str, float]:
    algorithm_1 = _ours(cluster, workload, batch, BrokerSettings(ElasticScheduling()))
    learned = CpuRun(cluster, workload, BrokerSettings(), known=False).run(batch)
    # Nobody thinks: all trajectories have an action that waits or runs, all the time.
    hurry = replace(workload, turns_mean=6.0, think_median_s=0.01, think_sigma=0.1)
    rush = hurry.draw(len(batch), options.seed)
    full = CpuRun(cluster, hurry, BrokerSettings(), time.thread_time).run(rush)
    full_fixed = CpuRun(cluster, hurry, BrokerSettings(FixedDegree(16))).run(rush)
    busy = CpuRun(cluster, workload, BrokerSettings(), time.thread_time).run(batch)
    long_work = replace(workload, reward_mean_s=2 * workload.reward_mean_s)
    long_batch = long_work.draw(len(batch), options.seed)
    long_ours = _ours(cluster, long_work, long_batch, BrokerSettings())
    long_pods = PodRun(cluster, long_work, PodRules()).run(long_batch)
    figures = {
        "pods_over_ours_1280_tools": pods.mean_s(TOOL) / ours.mean_s(TOOL),
        "pods_over_ours_1280_rewards": pods.mean_s(REWARD) / ours.mean_s(REWARD),
        "pods_over_ours_1280_twice_the_reward": long_pods.mean_trajectory_s
        / long_ours.mean_trajectory_s,
        "algorithm_1_over_ours_1280": algorithm_1.mean_trajectory_s / ours.mean_trajectory_s,
        "learned_over_profiled_1280": learned.mean_trajectory_s / ours.mean_trajectory_s,
        "decision_p50_ms": 1e3 * float(np.percentile(ours.decision_s, 50)),
        "decision_p99_ms": 1e3 * float(np.percentile(ours.decision_s, 99)),
        "decision_cpu_p99_ms": 1e3 * float(np.percentile(busy.decision_s, 99)),
        "decision_full_cpu_p99_ms": 1e3 * float(np.percentile(full.decision_s, 99)),
        "fixed_16_over_ours_full": full_fixed.mean_trajectory_s / full.mean_trajectory_s,
    }
    if options.data is not None:
        traces = traced(options.data_file(TRACE), workload, len(batch), options.seed)
        seen = _ours(cluster, workload, traces, BrokerSettings())
        peers = PodRun(cluster, workload, PodRules()).run(traces)
        figures["pods_over_ours_1280_traced"] = peers.mean_trajectory_s / seen.mean_trajectory_s
    return figures


def _fixed_degrees(options: BenchOptions) -> dict[str, float]:
    """The same broker with a fixed number of cores for every reward."""
    workload, cluster = CodingWorkload(), CpuCluster()
    figures: dict[str, float] = {}
    for number, size in enumerate((256, 1280)):
        options.progress(f"fixed degrees, batch {size}", 0.5 + 0.1 * number)
        batch = workload.draw(size // 8 if options.quick else size, options.seed)
        here = replace(cluster, cores=cluster.cores // 8) if options.quick else cluster
        ours = CpuRun(here, workload, BrokerSettings()).run(batch)
        for degree in (4, 16):
            fixed = CpuRun(here, workload, BrokerSettings(FixedDegree(degree))).run(batch)
            key = f"fixed_{degree}_over_ours_{size}"
            figures[key] = fixed.mean_trajectory_s / ours.mean_trajectory_s
            rewards = fixed.mean_s(REWARD) / ours.mean_s(REWARD)
            figures[f"fixed_{degree}_over_ours_{size}_rewards"] = rewards
    return figures


def _loaded(options: BenchOptions) -> dict[str, float]:
    """Suites twice as long that scale less well (90 % of their work), batch 1,280: the cores are
    nearly all busy.
    """
    options.progress("loaded", 0.97)
    workload = replace(CodingWorkload(), parallel_share=0.9, reward_mean_s=120.0)
    cluster = CpuCluster(cores=32) if options.quick else CpuCluster()
    batch = workload.draw(160 if options.quick else 1280, options.seed)
    ours = CpuRun(cluster, workload, BrokerSettings()).run(batch)
    peers: dict[str, Scheduling] = {
        "algorithm_1": ElasticScheduling(),
        "fixed_4": FixedDegree(4),
        "fixed_16": FixedDegree(16),
    }
    figures: dict[str, float] = {}
    for name, policy in peers.items():
        times = CpuRun(cluster, workload, BrokerSettings(policy)).run(batch)
        ratio = times.mean_trajectory_s / ours.mean_trajectory_s
        figures[f"{name}_over_ours_1280_loaded"] = ratio
    return figures


def _services(options: BenchOptions) -> dict[str, float]:
    """Ten reward services on 40 GPUs, means over a few draws."""
    workload, cluster = RewardWorkload(), GpuCluster()
    seeds = range(options.seed, options.seed + (1 if options.quick else 4))
    figures: dict[str, float] = {}
    for number, size in enumerate((256, 1024, 2048)):
        options.progress(f"services, batch {size}", 0.7 + 0.05 * number)
        draws = [workload.draw(size, seed) for seed in seeds]
        ours = _mean([BrokerRun(cluster, workload).run(draw) for draw in draws])
        static = _mean([static_services(cluster, workload, draw) for draw in draws])
        cold = _mean([serverless(cluster, workload, draw) for draw in draws])
        figures[f"static_over_ours_{size}"] = static / ours
        figures[f"serverless_over_ours_{size}"] = cold / ours
        if size < 2048:
            share = _gpus_for(static, cluster, workload, draws) / cluster.gpus
            figures[f"gpus_share_for_equal_time_{size}"] = share
    return figures


def _idle_services(options: BenchOptions) -> dict[str, float]:
    """The same where rollouts take so long that the static services' GPUs are busy for less than 3
    % of the time, as the paper found its own (section 2.2: SM activity of teacher models).
    """
    options.progress("services that are seldom asked", 0.85)
    workload, cluster = replace(RewardWorkload(), rollout_mean_s=1400.0), GpuCluster()
    seeds = range(options.seed, options.seed + (1 if options.quick else 4))
    draws = [workload.draw(1024, seed) for seed in seeds]
    static = _mean([static_services(cluster, workload, draw) for draw in draws])
    ours = _mean([BrokerRun(cluster, workload).run(draw) for draw in draws])
    busy = [sum(each.work_s for each in draw) / (cluster.gpus * draw[-1].at_s) for draw in draws]
    return {
        "static_over_ours_1024_idle": static / ours,
        "static_busy_share_1024_idle": float(np.mean(busy)),
        "gpus_share_for_equal_time_1024_idle": _gpus_for(static, cluster, workload, draws)
        / cluster.gpus,
    }


def _gpus_for(
    target_s: float,
    cluster: GpuCluster,
    workload: RewardWorkload,
    draws: list[list[RewardRequest]],
) -> int:
    """The fewest GPUs on which ours is as fast as the static services on all of them."""
    for gpus in range(4, cluster.gpus + 1, 2):
        here = replace(cluster, gpus=gpus)
        if _mean([BrokerRun(here, workload).run(draw) for draw in draws]) <= target_s:
            return gpus
    return cluster.gpus


def _mean(runs: list[ActionTimes]) -> float:
    return float(np.mean([run.mean_action_s for run in runs]))


def _search(options: BenchOptions) -> dict[str, float]:
    """10,000 calls against a quota, by the broker and by callers who try again."""
    options.progress("search", 0.95)
    workload = SearchWorkload()
    calls = workload.draw(1_000 if options.quick else 10_000, options.seed)
    rush = [(0.0, seconds) for _, seconds in calls]
    ours, peers = with_broker(workload, calls), without_broker(workload, calls)
    hurried = with_broker(workload, rush)
    quota = workload.limit.quota or 1
    window_s = workload.limit.window_s
    most = max(ours.most_in_a_window(window_s), hurried.most_in_a_window(window_s))
    lasted_s = hurried.granted_s[-1] - hurried.granted_s[0] + window_s
    return {
        "quota_most_in_a_window_share": most / quota,
        "quota_used_share": len(calls) / (quota / window_s * lasted_s),
        "retrying_over_ours_search": peers.times.mean_action_s / ours.times.mean_action_s,
        "retrying_failed_share": peers.times.failed / len(calls),
        "ours_failed_share": ours.times.failed / len(calls),
    }
