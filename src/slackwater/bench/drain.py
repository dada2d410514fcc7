"""`slackwater bench drain`: how long a fixed fleet takes to finish a backlog of jobs with the cycles of PlexRL's table (6.3).

Every job has rollout nodes of its own, as in the paper; train nodes are scarce and shared, which is what the policies do differently.
"""

from dataclasses import replace

from slackwater.bench.options import BenchOptions
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.sim.cluster.scenario import ClusterScenario
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.cluster.workload import CycleWorkload

POLICIES = ("isolated", "pack", "spread", "spread_backfill", "ours")
# Where a waiting job may not pass one that came earlier.
_IN_ORDER = frozenset({"isolated", "pack", "spread"})


def backlog(seed: int, quick: bool, *, short: bool = False) -> ClusterScenario:
    """More work than the train pool can start at once.

    A `short` backlog ends with its longest job, which bounds what any sharing can save; a long one by its sheer amount.
    """
    jobs, train_nodes = (40, 8) if quick else (120, 16)
    span_s = 24 * 3600.0 * jobs / 120
    if not short:
        jobs, train_nodes = (120, 6) if quick else (400, 16)
        span_s = 80 * 3600.0 * jobs / 400
    return ClusterScenario(
        name="drain",
        fleet=(Pool(Role.ROLLOUT, H20, 4096), Pool(Role.TRAIN, H800, train_nodes)),
        workload=CycleWorkload(jobs=jobs, span_s=span_s),
        seed=seed,
    )


def run(options: BenchOptions) -> dict[str, float]:
    """`<policy>_over_isolated` is the share of the isolated baseline's time to drain; `short.` has the short backlog's."""
    found = _drained(backlog(options.seed, options.quick), options, 0.0)
    short = _drained(backlog(options.seed, options.quick, short=True), options, 0.5)
    return found | {f"short.{key}": value for key, value in short.items()}


def _drained(scenario: ClusterScenario, options: BenchOptions, begun: float) -> dict[str, float]:
    ends_s: dict[str, float] = {}
    found: dict[str, float] = {}
    for number, policy in enumerate(POLICIES):
        options.progress(policy, begun + number / len(POLICIES) / 2)
        config = replace(scenario.policy, name=policy, backfill=policy not in _IN_ORDER)
        report = simulate(replace(scenario, policy=config))
        ends_s[policy] = report.end_s
        found[f"{policy}.drain_h"] = report.end_s / 3600
        found[f"{policy}.slo_attainment"] = report.slo_attainment
        waits = sorted(row.queued_s / row.solo_realised_s for row in report.jobs)
        found[f"{policy}.queueing_over_run_p50"] = waits[len(waits) // 2]
        found[f"{policy}.queueing_over_run_p95"] = waits[int(len(waits) * 0.95)]
    for policy in POLICIES[1:]:
        found[f"{policy}_over_isolated"] = ends_s[policy] / ends_s["isolated"]
    return found
