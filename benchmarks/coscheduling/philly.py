"""`slackwater bench philly`: group placement, hourly regrouping, co-location and ours over the
cells of WEAVE's Figure 15. Neither regrouping nor co-location keeps every SLO: `_keeping` is the
same policy with ours's obligation, which moves no job whose SLO cannot pay for the restart, or
co-locates none whose SLO cannot bear that.

Arrivals and run times come from `jobs/philly_300job_dev.csv.gz` under `--data`, or are drawn alike;
phase lengths are those of Table 6, taken as they are. One parameter changes at a time: workload
type, SLO, and largest group.
"""

from dataclasses import dataclass, replace

from benchmarks.cells import Figures, run_cells
from benchmarks.coscheduling.beside_cost import beside_cost
from benchmarks.options import BenchOptions
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.cluster.workload import Mix, ProfileWorkload
from slackwater.sim.inputs.traces import read_jobs_trace

TRACE = "jobs/philly_300job_dev.csv.gz"
_HOURLY = PolicyConfig(name="regrouping", regroup_every_s=3600.0)
POLICIES = {
    "ours": PolicyConfig(name="interleaving"),
    "regrouping": _HOURLY,
    "regrouping_keeping": replace(_HOURLY, options={"keep_slos": 1}),
    "group": PolicyConfig(name="group"),
    "colocated": PolicyConfig(name="colocated"),
    "colocated_keeping": PolicyConfig(name="colocated", options={"keep_slos": 1}),
    "solo": PolicyConfig(name="solo"),
}
_PEERS = tuple(name for name in POLICIES if name not in ("ours", "solo"))


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting of Figure 15."""

    name: str
    mix: Mix = "mixed"
    slo: tuple[float, float] = (1.0, 2.0)
    group_size: int = 5


CELLS = (
    Cell("mixed"),
    Cell("balanced", mix="balanced"),
    Cell("rollout_heavy", mix="rollout_heavy"),
    Cell("train_heavy", mix="train_heavy"),
    Cell("slo_1_2", slo=(1.2, 1.2)),
    Cell("slo_1_5", slo=(1.5, 1.5)),
    Cell("slo_2_0", slo=(2.0, 2.0)),
    Cell("group_size_2", group_size=2),
    Cell("group_size_3", group_size=3),
    Cell("group_size_4", group_size=4),
)


@dataclass(frozen=True, slots=True)
class PhillyCell:
    """One run: a setting under one policy, over these jobs."""

    cell: Cell
    policy: str
    seed: int
    base: ProfileWorkload

    def __str__(self) -> str:
        return f"{self.cell.name} {self.policy}"


def run(options: BenchOptions) -> Figures:
    """Per cell and policy what stands beside its cost, `<cell>.ours_over_<peer>`, the same for the
    cost of a job that kept its SLO (`_per_kept_slo`; not every peer keeps all), and the mixed cell
    against solo.
    """
    base = _workload(options)
    runs = [
        PhillyCell(cell, policy, options.seed, base)
        for policy in POLICIES
        for cell in CELLS
        if policy != "solo" or cell.name == "mixed"
    ]
    measured = run_cells(options, "every cell", measure, runs)
    found: Figures = {}
    costs: Figures = {}
    for one, figures in zip(runs, measured, strict=True):
        key = f"{one.cell.name}.{one.policy}"
        found |= {f"{key}.{name}": value for name, value in figures.items()}
        costs[key] = figures["cost"]
    for cell in CELLS:
        for peer in _PEERS:
            ratio = costs[f"{cell.name}.ours"] / costs[f"{cell.name}.{peer}"]
            kept, peer_kept = (found[f"{cell.name}.{p}.slo_attainment"] for p in ("ours", peer))
            found[f"{cell.name}.ours_over_{peer}"] = ratio
            found[f"{cell.name}.ours_over_{peer}_per_kept_slo"] = ratio * peer_kept / kept
    for policy in ("ours", *_PEERS):
        found[f"mixed.{policy}.cost_vs_solo"] = costs["mixed.solo"] / costs[f"mixed.{policy}"]
    # Figure 15 draws the largest group of five, and SLO ~ U(1, 2), once each: they are the mixed
    # cell.
    for twin in ("group_size_5", "slo_uniform"):
        of_mixed = {key: value for key, value in found.items() if key.startswith("mixed.")}
        found |= {key.replace("mixed", twin, 1): value for key, value in of_mixed.items()}
    return found


def measure(one: PhillyCell) -> Figures:
    """Simulate one cell."""
    report = simulate(_scenario(one.base, one.cell, one.policy, one.seed))
    return beside_cost(report) | {"cost": report.cost}


def _workload(options: BenchOptions) -> ProfileWorkload:
    jobs = 60 if options.quick else 300
    if options.data is None:
        whole = ProfileWorkload()
        return replace(whole, jobs=jobs, span_s=whole.span_s * jobs / whole.jobs)
    traced = read_jobs_trace(options.data_file(TRACE), jobs)
    arrivals = tuple((job.arrival_s, job.duration_s) for job in traced)
    return ProfileWorkload(jobs=len(arrivals), arrivals=arrivals)


def _scenario(base: ProfileWorkload, cell: Cell, policy: str, seed: int) -> ClusterScenario:
    low, high = cell.slo
    config = POLICIES[policy]
    if config.name not in ("solo", "colocated"):
        limits = {"max_group_size": float(cell.group_size)}
        config = replace(config, options={**config.options, **limits})
    return ClusterScenario(
        name=f"philly {cell.name}",
        workload=replace(base, mix=cell.mix, slo_low=low, slo_high=high),
        policy=config,
        seed=seed,
    )
