"""`slackwater bench optimum`: what policies cost against the exact optimum under group placement's
rules, on small instances.

Phase lengths are WEAVE's Table 6 (all nine kinds alike), SLO ~ U(1, 2), groups of five at most.
Jobs come one after the other, a second apart. Two sets of instances: in the first all jobs would
take eight hours alone, which leaves the grouping itself to be found; in the second that is drawn
from U(4, 12) h (keys `lifetimes.`), which the optimum knows and group placement's rules do not look
at. Every placement is run in the simulator until all jobs are done, the optimum's too: cost and SLO
attainment are what came out, not what the policy promised.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.cells import Figures, run_cells
from benchmarks.coscheduling.optimal_placement import OptimalPlacement
from benchmarks.options import BenchOptions
from slackwater.control.coschedule.config import CoScheduleConfig
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.sim.cluster.report import JobRow
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.cluster.simulated_cluster import SimulatedCluster

POLICIES = ("ours", "group", "regrouping", "horizon", "random", "most_idle")
GROUP_SIZE = 5
_ALONE_H = {"": (8.0, 8.0), "lifetimes.": (4.0, 12.0)}
_RANGES_S = (
    ((50, 100), (50, 100)),
    ((100, 200), (100, 200)),
    ((200, 300), (200, 300)),
    ((100, 200), (25, 50)),
    ((200, 400), (50, 100)),
    ((400, 600), (100, 200)),
    ((25, 50), (100, 200)),
    ((50, 100), (200, 400)),
    ((100, 200), (400, 600)),
)


@dataclass(frozen=True, slots=True)
class Instance:
    """Jobs drawn for one of the two sets, which every policy places."""

    prefix: str
    number: int
    jobs: int
    seed: int

    def __str__(self) -> str:
        return f"{self.prefix}instance {self.number + 1}"


def run(options: BenchOptions) -> Figures:
    """`<policy>.cost_ratio_mean`, `.cost_ratio_max`, `.slo_attainment`, and all of it again under
    `lifetimes.`.

    A policy that does not look at SLOs can be cheaper than any that does;
    `.cost_per_kept_job_ratio` is the mean ratio over the share of jobs that got what they asked
    for.
    """
    instances, count = (8, 5) if options.quick else (48, 7)
    found: Figures = {"instances": instances, "jobs_each": count}
    cells = [
        Instance(prefix, number, count, options.seed)
        for prefix in _ALONE_H
        for number in range(instances)
    ]
    measured = run_cells(options, "every instance", measure, cells)
    for prefix in _ALONE_H:
        cases = [case for cell, case in zip(cells, measured, strict=True) if cell.prefix == prefix]
        found.update((prefix + key, figure) for key, figure in _figures(cases, count).items())
    return found


def _figures(cases: Sequence[Figures], count: int) -> Figures:
    def mean(key: str) -> float:
        return float(np.mean([case[key] for case in cases]))

    found: Figures = {}
    for policy in (*POLICIES, "optimum"):
        attained = mean(f"{policy}.kept") / count
        found[f"{policy}.slo_attainment"] = attained
        for key in ("mean_slowdown", "iterations_in_bound"):
            found[f"{policy}.{key}"] = mean(f"{policy}.{key}")
        if policy == "optimum":
            continue
        ratios = [case[f"{policy}.cost"] / case["optimum.cost"] for case in cases]
        ratio = float(np.mean(ratios))
        found[f"{policy}.cost_ratio_mean"] = ratio
        found[f"{policy}.cost_ratio_max"] = max(ratios)
        found[f"{policy}.cost_per_kept_job_ratio"] = ratio / attained if attained else np.inf
    return found


def measure(instance: Instance) -> Figures:
    """Place one instance's jobs under every policy, and at best."""
    generator = np.random.default_rng([instance.seed, instance.number])
    jobs = draw_jobs(generator, instance.jobs, _ALONE_H[instance.prefix])
    outcomes = {
        policy: _run_policy(policy, jobs, instance.seed + instance.number) for policy in POLICIES
    }
    outcomes["optimum"] = _run_optimum(jobs)
    return {
        f"{policy}.{key}": value
        for policy, outcome in outcomes.items()
        for key, value in outcome.items()
    }


def draw_jobs(
    generator: np.random.Generator, count: int, alone_h: tuple[float, float] = (8.0, 8.0)
) -> tuple[JobSpec, ...]:
    """Jobs of Table 6's mix; each would take a time within `alone_h` alone."""
    jobs = []
    for number in range(count):
        rollout, train = _RANGES_S[int(generator.integers(len(_RANGES_S)))]
        profile = JobProfile(float(generator.uniform(*rollout)), float(generator.uniform(*train)))
        iterations = max(round(float(generator.uniform(*alone_h)) * 3600 / profile.solo_s), 1)
        slo = float(generator.uniform(1, 2))
        jobs.append(JobSpec(JobId(f"job-{number}"), float(number), iterations, slo, profile))
    return tuple(jobs)


def _run_policy(policy: str, jobs: Sequence[JobSpec], seed: int) -> Figures:
    every_s = 3600.0 if policy == "regrouping" else 0.0
    limits = {"max_group_size": float(GROUP_SIZE)}
    config = PolicyConfig(name=policy, options=limits, regroup_every_s=every_s)
    report = simulate(ClusterScenario(jobs=tuple(jobs), policy=config, seed=seed))
    return _outcome(report.cost, report.jobs)


def _run_optimum(jobs: Sequence[JobSpec]) -> Figures:
    scenario = ClusterScenario(jobs=tuple(jobs), policy=PolicyConfig(name="group"))
    fleet = scenario.view()
    policy = OptimalPlacement(fleet, jobs, GROUP_SIZE)
    config = CoScheduleConfig(ordering="round_robin", switching=scenario.switching)
    cluster = SimulatedCluster(scenario, tuple(jobs), CoScheduler(policy, fleet, config))
    cluster.run(None)
    rows = [body.account.row(cluster.now_s) for body in cluster.executions.values()]
    return _outcome(cluster.account.cost, rows)


def _outcome(cost: float, rows: Sequence[JobRow]) -> Figures:
    made = sum(row.iterations_done for row in rows)
    return {
        "cost": cost,
        "kept": sum(row.kept_slo for row in rows),
        "mean_slowdown": float(np.mean([row.slowdown_realised for row in rows])),
        "iterations_in_bound": sum(row.iterations_in_bound for row in rows) / made,
    }
