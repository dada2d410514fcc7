"""`slackwater bench cluster`: what two weeks of one tenant's jobs cost under each policy (WEAVE
6.4).

`<policy>.cost_vs_solo` is how many times cheaper the policy is than solo-disaggregated,
`.cost_vs_colocated` than co-located; the paper has 1.84 and 1.38 for groups on a trace that is not
public. `group` never moves a job; `regrouping` groups all of them anew every hour.
"""

from dataclasses import replace

from benchmarks.coscheduling.beside_cost import beside_cost
from benchmarks.options import BenchOptions
from slackwater.sim.cluster.report import RunReport
from slackwater.sim.cluster.scenario import ClusterScenario, LengthConfig
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.cluster.workload import ProductionWorkload

POLICIES = ("solo", "colocated", "group", "regrouping", "horizon", "ours")


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
    """Every policy on the same jobs with the same drawn lengths."""
    scenario = production(options.seed, options.quick)
    reports: dict[str, RunReport] = {}
    for number, policy in enumerate(POLICIES):

        def moved(share: float, number: int = number, policy: str = policy) -> None:
            options.progress(policy, (number + share) / len(POLICIES))

        every_s = 3600.0 if policy == "regrouping" else scenario.policy.regroup_every_s
        config = replace(scenario.policy, name=policy, regroup_every_s=every_s)
        reports[policy] = simulate(replace(scenario, policy=config), progress=moved)
    return figures(reports)


def figures(reports: dict[str, RunReport]) -> dict[str, float]:
    """Costs against the two baselines, attainment, and ours against both papers' policies."""
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
    found["ours_over_group"] = reports["ours"].cost / reports["group"].cost
    found["ours_over_regrouping"] = reports["ours"].cost / reports["regrouping"].cost
    found["ours_over_horizon"] = reports["ours"].cost / reports["horizon"].cost
    return found
