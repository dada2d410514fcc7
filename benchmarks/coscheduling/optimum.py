"""`slackwater bench optimum`: what policies cost against the exact optimum under group placement's
rules, on small instances.

Phase lengths are WEAVE's Table 6 (all nine kinds alike), SLO ~ U(1, 2), groups of five at most.
Jobs come one after the other, a second apart. Two sets of instances: in the first all jobs would
take eight hours alone, which leaves the grouping itself to be found; in the second that is drawn
from U(4, 12) h (keys `lifetimes.`), which the optimum knows and group placement's rules do not look
at. Every placement is run in the simulator until all jobs are done, the optimum's too: cost and SLO
attainment are what came out, not what the policy promised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
class _Outcome:
    cost: float
    kept: int
    slowdown: float
    iterations_in_bound: float


def run(options: BenchOptions) -> dict[str, float]:
    """`<policy>.cost_ratio_mean`, `.cost_ratio_max`, `.slo_attainment`, and all of it again under
    `lifetimes.`.

    A policy that does not look at SLOs can be cheaper than any that does;
    `.cost_per_kept_job_ratio` is the mean ratio over the share of jobs that got what they asked
    for.
    """
    instances, count = (8, 5) if options.quick else (48, 7)
    found: dict[str, float] = {"instances": instances, "jobs_each": count}
    for nth, (prefix, alone_h) in enumerate(_ALONE_H.items()):
        cases = []
        for number in range(instances):
            done = (nth * instances + number) / (len(_ALONE_H) * instances)
            options.progress(f"{prefix}instance {number + 1} of {instances}", done)
            jobs = draw_jobs(np.random.default_rng([options.seed, number]), count, alone_h)
            cases.append(_run_all(jobs, options.seed + number))
        found.update((prefix + key, figure) for key, figure in _figures(cases, count).items())
    return found


def _run_all(jobs: Sequence[JobSpec], seed: int) -> dict[str, _Outcome]:
    outcomes = {policy: _run_policy(policy, jobs, seed) for policy in POLICIES}
    return {**outcomes, "optimum": _run_optimum(jobs)}


def _figures(cases: Sequence[Mapping[str, _Outcome]], count: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for policy in (*POLICIES, "optimum"):
        attained = sum(case[policy].kept for case in cases) / (len(cases) * count)
        figures[f"{policy}.slo_attainment"] = attained
        for beside in ("slowdown", "iterations_in_bound"):
            mean = float(np.mean([getattr(case[policy], beside) for case in cases]))
            figures[f"{policy}.{beside.replace('slowdown', 'mean_slowdown')}"] = mean
        if policy == "optimum":
            continue
        ratios = [case[policy].cost / case["optimum"].cost for case in cases]
        mean = float(np.mean(ratios))
        figures[f"{policy}.cost_ratio_mean"] = mean
        figures[f"{policy}.cost_ratio_max"] = float(np.max(ratios))
        figures[f"{policy}.cost_per_kept_job_ratio"] = mean / attained if attained else np.inf
    return figures


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


def _run_policy(policy: str, jobs: Sequence[JobSpec], seed: int) -> _Outcome:
    every_s = 3600.0 if policy == "regrouping" else 0.0
    limits = {"max_group_size": float(GROUP_SIZE)}
    config = PolicyConfig(name=policy, options=limits, regroup_every_s=every_s)
    report = simulate(ClusterScenario(jobs=tuple(jobs), policy=config, seed=seed))
    return _outcome(report.cost, report.jobs)


def _run_optimum(jobs: Sequence[JobSpec]) -> _Outcome:
    scenario = ClusterScenario(jobs=tuple(jobs), policy=PolicyConfig(name="group"))
    fleet = scenario.view()
    policy = OptimalPlacement(fleet, jobs, GROUP_SIZE)
    config = CoScheduleConfig(ordering="round_robin", switching=scenario.switching)
    cluster = SimulatedCluster(scenario, tuple(jobs), CoScheduler(policy, fleet, config))
    cluster.run(None)
    rows = [body.account.row(cluster.now_s) for body in cluster.executions.values()]
    return _outcome(cluster.account.cost, rows)


def _outcome(cost: float, rows: Sequence[JobRow]) -> _Outcome:
    made = sum(row.iterations_done for row in rows)
    within = sum(row.iterations_in_bound for row in rows)
    slowdown = float(np.mean([row.slowdown_realised for row in rows]))
    return _Outcome(cost, sum(row.kept_slo for row in rows), slowdown, within / made)
