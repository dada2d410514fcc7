"""`slackwater bench drift`: lengths that grow or shrink over a job's life, against regrouping all
jobs every hour (WEAVE 6.6).

Declared lengths are those at the start, so they bound nothing here; a job kept its SLO if it took
at most `slo` times what its own drifted phases take alone. The regrouping baseline is charged its
restarts, not its search.
"""

from dataclasses import dataclass
from itertools import product
from typing import Literal

from benchmarks.cells import Figures, run_cells
from benchmarks.coscheduling.beside_cost import beside_cost
from benchmarks.options import BenchOptions
from slackwater.sim.cluster.scenario import ClusterScenario, DriftConfig, PolicyConfig
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.cluster.workload import ProductionWorkload

Setting = Literal["increasing", "decreasing", "mixed"]
SETTINGS: tuple[Setting, ...] = ("increasing", "decreasing", "mixed")
POLICIES = ("ours", "regrouping", "group")


@dataclass(frozen=True, slots=True)
class DriftCell:
    """One run: a setting under one policy."""

    setting: Setting
    policy: str
    seed: int
    quick: bool

    def __str__(self) -> str:
        return f"{self.setting} {self.policy}"


def run(options: BenchOptions) -> Figures:
    """`<setting>.<policy>.cost_vs_regrouping` and what stands beside a cost; SLOs are realised
    ones.
    """
    cells = [
        DriftCell(setting, policy, options.seed, options.quick)
        for policy, setting in product(POLICIES, SETTINGS)
    ]
    measured = run_cells(options, "every setting", measure, cells)
    costs = {str(cell): figures.pop("cost") for cell, figures in zip(cells, measured, strict=True)}
    found: Figures = {}
    for cell, figures in zip(cells, measured, strict=True):
        key = f"{cell.setting}.{cell.policy}"
        found |= {f"{key}.{name}": value for name, value in figures.items()}
        over = costs[str(cell)] / costs[f"{cell.setting} regrouping"]
        found[f"{key}.cost_vs_regrouping"] = over
    return found


def measure(cell: DriftCell) -> Figures:
    """Simulate one cell."""
    days, jobs = (3, 43) if cell.quick else (14, 200)
    every_s = 3600.0 if cell.policy == "regrouping" else 0.0
    report = simulate(
        ClusterScenario(
            name="drift",
            workload=ProductionWorkload(jobs=jobs, span_s=days * 86400.0),
            policy=PolicyConfig(name=cell.policy, slo_basis="realised", regroup_every_s=every_s),
            drift=DriftConfig(setting=cell.setting),
            seed=cell.seed,
        )
    )
    kept = {"slo_attainment": report.slo_attainment_realised, "cost": report.cost}
    return beside_cost(report) | kept
