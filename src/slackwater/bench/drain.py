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
BACKLOGS = 4
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
    """`<policy>_over_isolated` is the share of the isolated baseline's time to drain, summed over several backlogs.

    One backlog's end hangs on a few long jobs, so a single draw says little. `short.` has the short backlogs' figures.
    """
    found = _drained(options, short=False)
    return found | {f"short.{key}": value for key, value in _drained(options, short=True).items()}


def _drained(options: BenchOptions, *, short: bool) -> dict[str, float]:
    ends_s: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    kept: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    seeds = range(options.seed, options.seed + (1 if options.quick else BACKLOGS))
    for seed in seeds:
        scenario = backlog(seed, options.quick, short=short)
        for number, policy in enumerate(POLICIES):
            done = (seed - options.seed + number / len(POLICIES)) / len(seeds)
            options.progress(policy, (done + short) / 2)
            config = replace(scenario.policy, name=policy, backfill=policy not in _IN_ORDER)
            report = simulate(replace(scenario, policy=config))
            ends_s[policy].append(report.end_s)
            kept[policy].append(report.slo_attainment)
    found: dict[str, float] = {}
    for policy in POLICIES:
        found[f"{policy}.drain_h"] = sum(ends_s[policy]) / len(seeds) / 3600
        found[f"{policy}.slo_attainment"] = min(kept[policy])
    for policy in POLICIES[1:]:
        found[f"{policy}_over_isolated"] = sum(ends_s[policy]) / sum(ends_s["isolated"])
    against = [
        ours / spread
        for ours, spread in zip(ends_s["ours"], ends_s["spread_backfill"], strict=True)
    ]
    found["ours_over_spread_backfill_min"] = min(against)
    found["ours_over_spread_backfill_max"] = max(against)
    return found
