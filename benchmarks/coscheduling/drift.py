"""`slackwater bench drift`: lengths that grow or shrink over a job's life, against regrouping all
jobs every hour (WEAVE 6.6).

Declared lengths are those at the start, so they bound nothing here; a job kept its SLO if it took
at most `slo` times what its own drifted phases take alone. The regrouping baseline is charged its
restarts, not its search.
"""

from dataclasses import replace
from typing import Literal

from benchmarks.coscheduling.beside_cost import beside_cost
from benchmarks.options import BenchOptions
from slackwater.sim.cluster.scenario import ClusterScenario, DriftConfig, PolicyConfig
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.cluster.workload import ProductionWorkload

SETTINGS: tuple[Literal["increasing", "decreasing", "mixed"], ...] = (
    "increasing",
    "decreasing",
    "mixed",
)
POLICIES = ("regrouping", "group", "ours")


def run(options: BenchOptions) -> dict[str, float]:
    """`<setting>.<policy>.cost_vs_regrouping` and what stands beside a cost; SLOs are realised
    ones.
    """
    days, jobs = (3, 43) if options.quick else (14, 200)
    base = ClusterScenario(
        name="drift",
        workload=ProductionWorkload(jobs=jobs, span_s=days * 86400.0),
        seed=options.seed,
    )
    found: dict[str, float] = {}
    runs = len(SETTINGS) * len(POLICIES)
    for number, setting in enumerate(SETTINGS):
        costs: dict[str, float] = {}
        for nth, policy in enumerate(POLICIES):
            options.progress(f"{setting} {policy}", (number * len(POLICIES) + nth) / runs)
            every_s = 3600.0 if policy == "regrouping" else 0.0
            chosen = PolicyConfig(name=policy, slo_basis="realised", regroup_every_s=every_s)
            scenario = replace(base, policy=chosen, drift=DriftConfig(setting=setting))
            report = simulate(scenario)
            costs[policy] = report.cost
            key = f"{setting}.{policy}"
            found |= {f"{key}.{name}": value for name, value in beside_cost(report).items()}
            found[f"{key}.slo_attainment"] = report.slo_attainment_realised
            found[f"{key}.cost_vs_regrouping"] = costs[policy] / costs["regrouping"]
    return found
