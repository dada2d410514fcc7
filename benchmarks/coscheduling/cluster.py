"""`slackwater bench cluster`: what two weeks of one tenant's jobs cost under each policy (WEAVE
6.4), over six seeds.

`<policy>.cost_vs_solo` is how many times cheaper the policy is than solo-disaggregated,
`.cost_vs_colocated` than co-located; the paper has 1.84 and 1.38 for groups on a trace that is not
public. `group` never moves a job, `group_colocating` is the same with train nodes alone as another
place for a job that no group takes, `regrouping` groups all of them anew every hour and is charged
its restarts, and `profiled_horizon` fits the lengths that were seen. Every figure is the mean over
the seeds; a ratio of costs also has the least and the most (`_min`, `_max`). Nodes are unbounded
there, so nobody queues (and spreading jobs out equals solo). `bounded.<policy>.` are the jobs of
the first seed on 0.7 of the nodes that ours needed at its peak. The other parts run by name alone
(`--part single_turn`), and their keys begin with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean

from benchmarks.cells import Figures, run_cells
from benchmarks.coscheduling.beside_cost import beside_cost
from benchmarks.options import BenchOptions
from slackwater.model.job import SloScope
from slackwater.model.node import Role
from slackwater.sim.cluster.report import RunReport
from slackwater.sim.cluster.scenario import ClusterScenario, LengthConfig, PolicyConfig
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.cluster.workload import ProductionWorkload

POLICIES = {
    "ours": PolicyConfig(name="interleaving"),
    "regrouping": PolicyConfig(name="regrouping", regroup_every_s=3600.0),
    "profiled_horizon": PolicyConfig(
        name="horizon", options={"profiled": 1}, regroup_every_s=600.0
    ),
    "horizon": PolicyConfig(name="horizon"),
    "group": PolicyConfig(name="group"),
    "group_colocating": PolicyConfig(name="group", options={"colocate": 1}),
    "colocated": PolicyConfig(name="colocated"),
    "solo": PolicyConfig(name="solo"),
}
_BOUNDED = ("ours", "regrouping", "profiled_horizon")
_BASELINES = ("group", "group_colocating", "regrouping", "horizon", "profiled_horizon")
_STRATEGIES = ("pack", "scale", "isolate", "colocate")
_SHARE_OF_PEAK = 0.7
DRAWN, WORST = LengthConfig(kind="long_tail"), LengthConfig(kind="worst")


@dataclass(frozen=True, slots=True)
class Trace:
    """One variant of the two weeks: how many jobs, of which kind, and how many seeds of it."""

    seeds: int = 2
    jobs: int = 200
    multi_turn_share: float = 0.5
    slo_scope: SloScope = "job"
    lengths: LengthConfig = DRAWN


def _near(share: float) -> LengthConfig:
    """All phases at about this share of their worst case."""
    return LengthConfig(kind="quantiles", quantiles=(share - 0.05, share + 0.05))


TRACES = {
    "two_weeks": Trace(seeds=6),
    "single_turn": Trace(multi_turn_share=0.0),
    "worst_lengths": Trace(lengths=WORST),
    **{f"lengths_{tenths}_10": Trace(lengths=_near(tenths / 10)) for tenths in (7, 8, 9)},
    "iteration_scope": Trace(slo_scope="iteration"),
    "iteration_scope_worst_lengths": Trace(slo_scope="iteration", lengths=WORST),
    "jobs_600": Trace(jobs=600),
    "jobs_2000": Trace(seeds=1, jobs=2000),
}
PARTS = (*TRACES, "bounded")


@dataclass(frozen=True, slots=True)
class ClusterCell:
    """One run: a trace's seed under one policy, on so many rollout and train nodes (None:
    unbounded).
    """

    trace: str
    seed: int
    policy: str
    quick: bool
    most_nodes: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.trace} seed {self.seed} {self.policy}"


def production(seed: int, quick: bool, trace: Trace = TRACES["two_weeks"]) -> ClusterScenario:
    """The two-week trace; a quick one has the same load over three days."""
    days, jobs = (3, ceil(trace.jobs * 3 / 14)) if quick else (14, trace.jobs)
    return ClusterScenario(
        name="production",
        workload=ProductionWorkload(
            jobs=jobs,
            span_s=days * 86400.0,
            multi_turn_share=trace.multi_turn_share,
            slo_scope=trace.slo_scope,
        ),
        lengths=trace.lengths,
        seed=seed,
    )


def run(options: BenchOptions) -> Figures:
    """Every policy on the same jobs with the same drawn lengths; a quick run has one seed."""
    if options.part not in (None, "two_weeks", "bounded"):
        found = _run_trace(options, options.part)
        return {f"{options.part}.{key}": value for key, value in found.items()}
    figures = _run_trace(options, "two_weeks") if options.part != "bounded" else {}
    return figures | _run_bounded(options) if options.part != "two_weeks" else figures


def _run_trace(options: BenchOptions, name: str) -> Figures:
    """One trace under every policy: means over its seeds, and the spread of the ratios."""
    seeds = range(options.seed, options.seed + (1 if options.quick else TRACES[name].seeds))
    cells = [ClusterCell(name, seed, key, options.quick) for key in POLICIES for seed in seeds]
    found = run_cells(options, name, measure, cells)
    by_seed: dict[int, Figures] = {seed: {} for seed in seeds}
    for cell, one in zip(cells, found, strict=True):
        by_seed[cell.seed] |= {f"{cell.policy}.{key}": value for key, value in one.items()}
    return _over_seeds([_compared(one) for one in by_seed.values()])


def _over_seeds(found: Sequence[Figures]) -> Figures:
    figures = {key: fmean(one[key] for one in found) for key in found[0]}
    for key in [key for key in figures if key.startswith("ours_over_")]:
        values = [one[key] for one in found]
        figures |= {f"{key}_mean": fmean(values), f"{key}_min": min(values)}
        figures[f"{key}_max"] = max(values)
    return figures


def _compared(found: Figures) -> Figures:
    """One seed's figures with each cost over the baselines'."""
    figures = dict(found)
    for policy in POLICIES:
        cost = found[f"{policy}.cost"]
        figures[f"{policy}.cost_vs_solo"] = found["solo.cost"] / cost
        figures[f"{policy}.cost_vs_colocated"] = found["colocated.cost"] / cost
    for baseline in _BASELINES:
        figures[f"ours_over_{baseline}"] = found["ours.cost"] / found[f"{baseline}.cost"]
    return figures


def _run_bounded(options: BenchOptions) -> Figures:
    """The first seed's jobs on fewer nodes than they would like."""
    wide = ClusterCell("two_weeks", options.seed, "ours", options.quick)
    (peaks,) = run_cells(options, "peak", measure, [wide])
    most = (
        ceil(peaks["rollout_nodes_peak"] * _SHARE_OF_PEAK),
        ceil(peaks["train_nodes_peak"] * _SHARE_OF_PEAK),
    )
    cells = [replace(wide, policy=key, most_nodes=most) for key in _BOUNDED]
    found = run_cells(options, "bounded", measure, cells)
    return {
        f"bounded.{cell.policy}.{key}": value
        for cell, one in zip(cells, found, strict=True)
        for key, value in one.items()
    }


def measure(cell: ClusterCell) -> Figures:
    """Simulate one cell."""
    scenario = production(cell.seed, cell.quick, TRACES[cell.trace])
    if cell.most_nodes is not None:
        most = dict(zip((Role.ROLLOUT, Role.TRAIN), cell.most_nodes, strict=True))
        fleet = tuple(replace(pool, max_nodes=most[pool.role]) for pool in scenario.fleet)
        scenario = replace(scenario, fleet=fleet)
    return _figures(simulate(replace(scenario, policy=POLICIES[cell.policy])))


def _figures(report: RunReport) -> Figures:
    return beside_cost(report) | {
        "cost": report.cost,
        "rollout_bubble_share": report.rollout.bubble_share,
        "train_bubble_share": report.train.bubble_share,
        "train_nodes_peak": report.train.peak_nodes,
        "rollout_nodes_peak": report.rollout.peak_nodes,
        **{
            f"admitted_{strategy}": report.admissions.get(strategy, 0) / len(report.jobs)
            for strategy in _STRATEGIES
        },
    }
