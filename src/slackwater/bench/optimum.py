"""`slackwater bench optimum`: what policies cost against the exact optimum under group placement's rules, on small instances.

Phase lengths are WEAVE's Table 6 (all nine kinds alike), SLO ~ U(1, 2), groups of five at most. Jobs come one after the other, a second
apart. Placement under those rules knows nothing of how long jobs live, so all would take eight hours alone (ours). Every placement is run in the simulator until all jobs are done, the optimum's too:
cost and SLO attainment are what came out, not what the policy promised.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slackwater.bench.options import BenchOptions
from slackwater.control.coschedule.config import CoScheduleConfig
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import Role
from slackwater.policy.fleet import Fleet
from slackwater.policy.optimum import OptimalPlacement
from slackwater.sim.cluster.body import SimulatedCluster
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.cluster.simulate import simulate

POLICIES = ("ours", "group", "horizon", "random", "most_idle")
GROUP_SIZE = 5
_ALONE_S = 8 * 3600.0
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


def run(options: BenchOptions) -> dict[str, float]:
    """`<policy>.cost_ratio_mean`, `.cost_ratio_max`, `.slo_attainment`; the optimum's own attainment and the instances.

    A policy that does not look at SLOs can be cheaper than any that does; `.cost_per_kept_job_ratio` is the
    mean ratio over the share of jobs that got what they asked for.
    """
    instances, count = (8, 5) if options.quick else (48, 7)
    ratios: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    kept = dict.fromkeys((*POLICIES, "optimum"), 0)
    for number in range(instances):
        options.progress(f"instance {number + 1} of {instances}", number / instances)
        jobs = draw_jobs(np.random.default_rng([options.seed, number]), count)
        best = _run_optimum(jobs)
        kept["optimum"] += best.kept
        for policy in POLICIES:
            outcome = _run_policy(policy, jobs, options.seed + number)
            ratios[policy].append(outcome.cost / best.cost)
            kept[policy] += outcome.kept
    found: dict[str, float] = {"instances": instances, "jobs_each": count}
    found["optimum.slo_attainment"] = kept["optimum"] / (instances * count)
    for policy in POLICIES:
        found[f"{policy}.cost_ratio_mean"] = float(np.mean(ratios[policy]))
        found[f"{policy}.cost_ratio_max"] = float(np.max(ratios[policy]))
        attained = kept[policy] / (instances * count)
        found[f"{policy}.slo_attainment"] = attained
        found[f"{policy}.cost_per_kept_job_ratio"] = (
            found[f"{policy}.cost_ratio_mean"] / attained if attained else np.inf
        )
    return found


def draw_jobs(generator: np.random.Generator, count: int) -> tuple[JobSpec, ...]:
    """Jobs of Table 6's mix."""
    jobs = []
    for number in range(count):
        rollout, train = _RANGES_S[int(generator.integers(len(_RANGES_S)))]
        profile = JobProfile(float(generator.uniform(*rollout)), float(generator.uniform(*train)))
        iterations = max(round(_ALONE_S / profile.solo_s), 1)
        slo = float(generator.uniform(1, 2))
        jobs.append(JobSpec(JobId(f"job-{number}"), float(number), iterations, slo, profile))
    return tuple(jobs)


def _run_policy(policy: str, jobs: Sequence[JobSpec], seed: int) -> _Outcome:
    config = PolicyConfig(name=policy, options={"max_group_size": float(GROUP_SIZE)})
    report = simulate(ClusterScenario(jobs=tuple(jobs), policy=config, seed=seed))
    return _Outcome(report.cost, sum(row.kept_slo for row in report.jobs))


def _run_optimum(jobs: Sequence[JobSpec]) -> _Outcome:
    scenario = ClusterScenario(jobs=tuple(jobs), policy=PolicyConfig(name="group"))
    fleet = Fleet(scenario.pool(Role.ROLLOUT), scenario.pool(Role.TRAIN))
    policy = OptimalPlacement(fleet, jobs, GROUP_SIZE)
    config = CoScheduleConfig(ordering="round_robin", switching=scenario.switching)
    cluster = SimulatedCluster(scenario, tuple(jobs), CoScheduler(policy, fleet, config))
    cluster.run(None)
    rows = [body.account.row(cluster.now_s) for body in cluster.bodies.values()]
    return _Outcome(cluster.account.cost, sum(row.kept_slo for row in rows))
