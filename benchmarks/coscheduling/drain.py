"""`slackwater bench drain`: how long a fixed fleet takes to finish a backlog of jobs with the
cycles of PlexRL's table (6.3).

Every job has rollout nodes of its own, as in the paper; train nodes are scarce and shared, which is
what the policies do differently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.cells import Figures, run_cells
from benchmarks.coscheduling.beside_cost import beside_cost
from benchmarks.options import BenchOptions
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.sim.cluster.scenario import ClusterScenario
from slackwater.sim.cluster.simulate import simulate
from slackwater.sim.cluster.workload import CycleWorkload

POLICIES = ("isolated", "pack", "spread", "spread_backfill", "ours")
# Where a waiting job may not pass one that came earlier.
_IN_ORDER = frozenset({"isolated", "pack", "spread"})


@dataclass(frozen=True, slots=True)
class _Size:
    """How much work a backlog holds, and how many of them are drawn."""

    jobs: int
    span_h: float
    train_nodes: int
    backlogs: int


_DAY = _Size(120, 24, 16, 12)
_LONG = _Size(400, 80, 16, 4)
_QUICK_DAY = _Size(40, 8, 8, 2)
_QUICK_LONG = _Size(120, 24, 6, 1)


def backlog(seed: int, quick: bool, *, long: bool = False) -> ClusterScenario:
    """More work than the train pool can start at once: a day of arrivals, or (`long`) more than
    three.
    """
    size = _size(quick, long)
    return ClusterScenario(
        name="drain",
        fleet=(
            Pool(Role.ROLLOUT, H20, 4096, owned=True),
            Pool(Role.TRAIN, H800, size.train_nodes, owned=True),
        ),
        workload=CycleWorkload(jobs=size.jobs, span_s=size.span_h * 3600.0),
        seed=seed,
    )


def _size(quick: bool, long: bool) -> _Size:
    if quick:
        return _QUICK_LONG if long else _QUICK_DAY
    return _LONG if long else _DAY


@dataclass(frozen=True, slots=True)
class DrainCell:
    """One backlog under one policy."""

    number: int
    policy: str
    seed: int
    quick: bool
    long: bool

    def __str__(self) -> str:
        return f"{'long ' if self.long else ''}backlog {self.number + 1} {self.policy}"


def run(options: BenchOptions) -> Figures:
    """`<policy>_over_isolated` is the share of the isolated baseline's time to drain, summed over
    several backlogs.

    One backlog's end hangs on a few long jobs, so a single draw says little. `long.` has the
    figures of longer backlogs.
    """
    cells = [
        DrainCell(number, policy, options.seed, options.quick, long)
        for policy in reversed(POLICIES)
        for long in (True, False)
        for number in range(_size(options.quick, long).backlogs)
    ]
    measured = dict(zip(cells, run_cells(options, "every backlog", measure, cells), strict=True))
    found = _drained({cell: one for cell, one in measured.items() if not cell.long})
    long = _drained({cell: one for cell, one in measured.items() if cell.long})
    return found | {f"long.{key}": value for key, value in long.items()}


def measure(cell: DrainCell) -> Figures:
    """Simulate one cell."""
    scenario = backlog(cell.seed + cell.number, cell.quick, long=cell.long)
    config = replace(scenario.policy, name=cell.policy, backfill=cell.policy not in _IN_ORDER)
    report = simulate(replace(scenario, policy=config))
    return beside_cost(report) | {"end_s": report.end_s}


def _drained(measured: Mapping[DrainCell, Figures]) -> Figures:
    def of(policy: str, key: str) -> list[float]:
        return [one[key] for cell, one in measured.items() if cell.policy == policy]

    ends_s = {policy: of(policy, "end_s") for policy in POLICIES}
    backlogs = len(ends_s["ours"])
    found: Figures = {"backlogs": backlogs}
    for policy in POLICIES:
        found[f"{policy}.drain_h"] = fmean(ends_s[policy]) / 3600
        found[f"{policy}.slo_attainment"] = min(of(policy, "slo_attainment"))
        found[f"{policy}.completion_mean_h"] = fmean(of(policy, "completion_mean_h"))
    for policy in POLICIES[1:]:
        found[f"{policy}_over_isolated"] = sum(ends_s[policy]) / sum(ends_s["isolated"])
    against = [
        ours / spread
        for ours, spread in zip(ends_s["ours"], ends_s["spread_backfill"], strict=True)
    ]
    found["ours_over_spread_backfill_min"] = min(against)
    found["ours_over_spread_backfill_max"] = max(against)
    found["ours_later_than_spread_backfill"] = sum(ratio > 1 for ratio in against)
    return found
