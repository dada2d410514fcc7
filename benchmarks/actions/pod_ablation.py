"""What of "pods over ours" is the pods' constants: each is set to ours in turn, then all of them;
beside mean completion times the makespan.

Keys: `pods_<which>_over_ours_1280` (mean completion time of a trajectory's actions) and
`..._makespan_over_ours_1280`, with `_traced` on public sessions (`--data`); `least_each_...`: the
same broker with the least cores for every action. `..._12800`: a batch ten times as large on the
same cores.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.actions.simulated.baselines import LeastEach
from benchmarks.actions.simulated.cpu_run import CpuCluster, CpuRun
from benchmarks.actions.simulated.pods import PodRules, PodRun
from benchmarks.actions.simulated.times import ActionTimes
from benchmarks.actions.simulated.workload import CodingWorkload, Step, traced
from benchmarks.options import BenchOptions
from slackwater.control.actions.broker_state import BrokerSettings

TRACE = "agents/swerebench_glm47flash_turns_dev.csv.gz"
_SIZE = 1280
_CORES = 32  # of one reward, at most, as ours may use
Trajectories = list[tuple[Step, ...]]


def pod_rules(cluster: CpuCluster, scale: int = 1) -> dict[str, PodRules]:
    """Pods as the paper sets them, and with one constant of ours, then with all."""
    paper = PodRules(per_node=PodRules().per_node // scale)
    start: dict[str, Any] = {"start_s": cluster.open_s, "schedule_s": 0.0}
    speed: dict[str, Any] = {"exec_s": cluster.overhead_s}
    cores: dict[str, Any] = {"limit": min(_CORES, cluster.cores)}
    room: dict[str, Any] = {"per_node": 1 << 30, "request": 0.01}
    return {
        "as_published": paper,
        "starting_as_ours": replace(paper, **start),
        "commands_as_ours": replace(paper, **speed),
        "of_32_cores": replace(paper, **cores),
        "all_as_ours": replace(paper, **start, **speed, **cores),
        "all_and_room_as_ours": replace(paper, **start, **speed, **cores, **room),
    }


def pod_ablation(options: BenchOptions) -> dict[str, float]:
    """All of it, at batch 1,280 on 1,280 cores, drawn and traced; then ten times the batch."""
    workload = CodingWorkload()
    scale = 32 if options.quick else 1  # as many trajectories for each core
    cluster = CpuCluster(cores=CpuCluster().cores // scale)
    size, rules = _SIZE // scale, pod_rules(cluster, scale)
    options.progress("pod constants", 0.0)
    figures = _compared(cluster, workload, workload.draw(size, options.seed), rules, "1280")
    if options.data is not None:
        sessions = traced(options.data_file(TRACE), workload, size, options.seed)
        figures |= _compared(cluster, workload, sessions, rules, "1280_traced")
    options.progress("ten times the batch", 0.5)
    return figures | _ten_times(cluster, workload, workload.draw(10 * size, options.seed), rules)


def _compared(
    cluster: CpuCluster,
    workload: CodingWorkload,
    batch: Trajectories,
    rules: dict[str, PodRules],
    size: str,
) -> dict[str, float]:
    ours = CpuRun(cluster, workload, BrokerSettings()).run(batch)
    least = CpuRun(cluster, workload, BrokerSettings(LeastEach())).run(batch)
    peers = {f"pods_{name}": PodRun(cluster, workload, each) for name, each in rules.items()}
    figures = {f"ours_makespan_s_{size}": ours.finished_s}
    figures |= _over("least_each", least, ours, size)
    for name, peer in peers.items():
        figures |= _over(name, peer.run(batch), ours, size)
    return figures


def _ten_times(
    cluster: CpuCluster, workload: CodingWorkload, batch: Trajectories, rules: dict[str, PodRules]
) -> dict[str, float]:
    began_s = time.perf_counter()
    ours = CpuRun(cluster, workload, BrokerSettings(), time.thread_time).run(batch)
    took_s = time.perf_counter() - began_s
    least = CpuRun(cluster, workload, BrokerSettings(LeastEach())).run(batch)
    figures = {
        "ours_trajectory_s_12800": ours.mean_trajectory_s,
        "ours_makespan_s_12800": ours.finished_s,
        "decision_cpu_p50_ms_12800": 1e3 * float(np.percentile(ours.decision_s, 50)),
        "decision_cpu_p99_ms_12800": 1e3 * float(np.percentile(ours.decision_s, 99)),
        "decision_cpu_s_12800": float(np.sum(ours.decision_s)),
        "simulated_in_s_12800": took_s,
    }
    figures |= _over("least_each", least, ours, "12800")
    for name in ("as_published", "all_and_room_as_ours"):
        pods = PodRun(cluster, workload, rules[name]).run(batch)
        figures |= _over(f"pods_{name}", pods, ours, "12800")
    return figures


def _over(name: str, peer: ActionTimes, ours: ActionTimes, size: str) -> dict[str, float]:
    return {
        f"{name}_over_ours_{size}": peer.mean_trajectory_s / ours.mean_trajectory_s,
        f"{name}_makespan_over_ours_{size}": peer.finished_s / ours.finished_s,
    }
