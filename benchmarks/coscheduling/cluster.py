"""`slackwater bench cluster`: what two weeks of one tenant's jobs cost under each policy (WEAVE
6.4), over six seeds.

`<policy>.cost_vs_solo` is how many times cheaper the policy is than solo-disaggregated,
`.cost_vs_colocated` than co-located; the paper has 1.84 and 1.38 for groups on a trace that is not
public. `group` never moves a job, `group_colocating` is the same with train nodes alone as another
place for a job that no group takes, `regrouping` groups all of them anew every hour and is charged
its restarts, and `profiled_horizon` fits the lengths that were seen. Every figure is the mean over
the seeds; a ratio of costs also has the least and the most (`_min`, `_max`). Nodes are unbounded
there, so nobody queues (and spreading jobs out equals solo). `bounded.<policy>.` are the jobs of
the first seed on 0.7 of the nodes that ours needed at its peak.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from math import ceil
from statistics import fmean

from benchmarks.coscheduling.beside_cost import beside_cost
from benchmarks.options import BenchOptions
from slackwater.model.node import Role
from slackwater.sim.cluster.report import RunReport
from slackwater.sim.cluster.scenario import ClusterScenario, LengthConfig, PolicyConfig
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.cluster.workload import ProductionWorkload

POLICIES = {
    "solo": PolicyConfig(name="solo"),
    "colocated": PolicyConfig(name="colocated"),
    "group": PolicyConfig(name="group"),
    "group_colocating": PolicyConfig(name="group", options={"colocate": 1}),
    "regrouping": PolicyConfig(name="regrouping", regroup_every_s=3600.0),
    "horizon": PolicyConfig(name="horizon"),
    "profiled_horizon": PolicyConfig(
        name="horizon", options={"profiled": 1}, regroup_every_s=600.0
    ),
    "ours": PolicyConfig(name="ours"),
}
_BOUNDED = ("regrouping", "profiled_horizon", "ours")
_BASELINES = ("group", "group_colocating", "regrouping", "horizon", "profiled_horizon")
_SEEDS = 6
_SHARE_OF_PEAK = 0.7


def production(seed: int, quick: bool) -> ClusterScenario:
    """The two-week trace; a quick one has the same load over three days."""
    days, jobs = (3, 43) if quick else (14, 200)
    return ClusterScenario(
        name="production",
        workload=ProductionWorkload(jobs=jobs, span_s=days * 86400.0),
        lengths=LengthConfig(kind="long_tail"),
        seed=seed,
    )


def run(options: BenchOptions) -> dict[str, float]:
    """Every policy on the same jobs with the same drawn lengths; a quick run has one seed."""
    seeds = range(options.seed, options.seed + (1 if options.quick else _SEEDS))
    found: list[dict[str, float]] = []
    options.progress("every policy", 0.0)
    with ProcessPoolExecutor(max_workers=min(os.cpu_count() or 1, len(seeds))) as pool:
        for one in pool.map(partial(run_seed, quick=options.quick), seeds):
            found.append(one)
            options.progress("every policy", len(found) / len(seeds))
    figures = {key: fmean(one[key] for one in found) for key in found[0]}
    for key in [key for key in figures if key.startswith("ours_over_")]:
        values = [one[key] for one in found]
        figures |= {f"{key}_mean": fmean(values), f"{key}_min": min(values)}
        figures[f"{key}_max"] = max(values)
    figures |= run_bounded(options, found[0])
    return figures


def run_seed(seed: int, *, quick: bool) -> dict[str, float]:
    """One seed under every policy."""
    scenario = production(seed, quick)
    return figures_of(
        {key: simulate(replace(scenario, policy=policy)) for key, policy in POLICIES.items()}
    )


def run_bounded(options: BenchOptions, unbounded: dict[str, float]) -> dict[str, float]:
    """The first seed's jobs on fewer nodes than they would like."""
    scenario = production(options.seed, options.quick)
    peaks = {
        Role.ROLLOUT: unbounded["ours.rollout_nodes_peak"],
        Role.TRAIN: unbounded["ours.train_nodes_peak"],
    }
    fleet = tuple(
        replace(pool, max_nodes=ceil(peaks[pool.role] * _SHARE_OF_PEAK)) for pool in scenario.fleet
    )
    figures: dict[str, float] = {}
    for number, key in enumerate(_BOUNDED):
        report = simulate(replace(scenario, fleet=fleet, policy=POLICIES[key]))
        figures |= beside_cost(f"bounded.{key}", report)
        options.progress("bounded fleets", (number + 1) / len(_BOUNDED))
    return figures


def figures_of(reports: dict[str, RunReport]) -> dict[str, float]:
    """Costs against the two baselines, attainment, and ours against the papers' policies."""
    found: dict[str, float] = {}
    for policy, report in reports.items():
        found.update(beside_cost(policy, report))
        found[f"{policy}.cost_vs_solo"] = reports["solo"].cost / report.cost
        found[f"{policy}.cost_vs_colocated"] = reports["colocated"].cost / report.cost
        found[f"{policy}.rollout_bubble_share"] = report.rollout.bubble_share
        found[f"{policy}.train_bubble_share"] = report.train.bubble_share
        found[f"{policy}.train_nodes_peak"] = report.train.peak_nodes
        found[f"{policy}.rollout_nodes_peak"] = report.rollout.peak_nodes
        for strategy in ("pack", "scale", "isolate", "colocate"):
            admitted = report.admissions.get(strategy, 0)
            found[f"{policy}.admitted_{strategy}"] = admitted / len(report.jobs)
    for baseline in _BASELINES:
        found[f"ours_over_{baseline}"] = reports["ours"].cost / reports[baseline].cost
    return found
