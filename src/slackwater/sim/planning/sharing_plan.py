"""How given jobs should share a given fleet, and what that saves (`slackwater plan`).

Placement is online, so the order of arrival matters; a planner may choose it. A few orders are
given to fresh co-schedulers; of those that turn away fewest, each is run in virtual time at
worst-case lengths, and the one with most work for a dollar is kept. Jobs count as having many
iterations.

The work is bounded: with many jobs fewer orders are tried, and runs are only as long as sharing
takes to show. A job that fits nowhere, or whose phases are beyond all reason, is turned away alone.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slackwater.control.coschedule.commands import (
    HoldJob,
    RefuseJob,
    RentNodes,
    ReturnNodes,
    StartJob,
)
from slackwater.control.coschedule.events import JobArrived
from slackwater.model.errors import RefusedError
from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.placement import Phase
from slackwater.policy.placement.fleet import FleetView
from slackwater.sim.cluster.report import RunReport
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.cluster.simulate import new_controller, simulate

Progress = Callable[[float], None]

_CYCLES = 24
_MOST_ITERATIONS = 20_000  # of all jobs together, in one run of a plan
_MANY_JOBS = 150  # from here on two orders are tried, and one from twice as many on
# A phase is longer than what it takes to switch to it, and ends within days.
_SHORTEST_PHASE_S, _LONGEST_PHASE_S = 1.0, 1e6
# Jobs come this far apart, so that a run of the plan takes them in the plan's order.
_APART_S = 1e-6

_ORDERS: Mapping[str, Callable[[JobSpec], float]] = {
    "as given": lambda spec: 0.0,
    "longest iteration first": lambda spec: -spec.profile.solo_s,
    "shortest iteration first": lambda spec: spec.profile.solo_s,
    "tightest SLO first": lambda spec: spec.slo,
    "most nodes first": lambda spec: -(spec.profile.rollout_nodes + spec.profile.train_nodes),
}


@dataclass(frozen=True, slots=True)
class UnplacedJob:
    """A job without nodes: it waits for others to leave, or (`for_good`) can never run here."""

    job: JobId
    reason: str
    for_good: bool


@dataclass(frozen=True, slots=True)
class SharingPlan:
    """Where every job goes, which are turned away and why, and the fleet's price."""

    order: str
    jobs: tuple[JobSpec, ...]
    starts: Mapping[JobId, StartJob]
    turned_away: tuple[UnplacedJob, ...]
    price_per_h: float
    alone_price_per_h: float

    @property
    def placed(self) -> tuple[JobSpec, ...]:
        """Jobs that have nodes, in the plan's order."""
        return tuple(spec for spec in self.jobs if spec.job in self.starts)

    def groups(self) -> dict[str, list[StartJob]]:
        """Who shares, in order of first use."""
        found: dict[str, list[StartJob]] = {}
        for spec in self.placed:
            start = self.starts[spec.job]
            found.setdefault(start.group, []).append(start)
        return found


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan, and a run of it."""

    plan: SharingPlan
    report: RunReport

    def iteration_s(self) -> dict[JobId, float]:
        """Mean time between two ends of training, while all jobs ran."""
        report = self.report
        together_s = min(row.finished_s or report.end_s for row in report.jobs)
        ends: dict[JobId, set[float]] = {}
        for span in report.spans:
            if span.phase is Phase.TRAIN and span.kind == "run" and span.end_s <= together_s:
                ends.setdefault(span.job, set()).add(span.end_s)
        lengths = {}
        for row in report.jobs:
            seen = sorted(ends.get(row.job, ()))
            gaps = len(seen) - 1
            whole_s = seen[-1] - seen[0] if gaps > 0 else row.elapsed_s
            lengths[row.job] = whole_s / (gaps if gaps > 0 else row.iterations)
        return lengths

    def work_per_dollar(self) -> float:
        """Iterations per dollar, relative to every job on nodes of its own."""
        took_s = self.iteration_s()
        speeds = [spec.profile.solo_s / took_s[spec.job] for spec in self.plan.placed]
        return sum(speeds) / len(speeds) * self.plan.alone_price_per_h / self.plan.price_per_h


def plan_sharing(
    scenario: ClusterScenario,
    progress: Progress | None = None,
    first: Callable[[SharingPlan], None] = lambda plan: None,
) -> MeasuredPlan:
    """The best plan for the scenario's jobs, all at once; `first` gets the first one early."""
    progress = progress or (lambda share: None)
    plans = candidate_plans(scenario, lambda share: progress(share / 2), first)
    if not plans[0].placed:
        reasons = "; ".join(f"{away.job}: {away.reason}" for away in plans[0].turned_away)
        raise RefusedError(f"no job can be placed: {reasons}")
    measured = []
    for number, plan in enumerate(plans):
        report = simulate(dataclasses.replace(scenario, jobs=plan.placed), spans=True)
        measured.append(MeasuredPlan(plan, report))
        progress(0.5 + (number + 1) / len(plans) / 2)
    return max(measured, key=lambda one: one.work_per_dollar())


def candidate_plans(
    scenario: ClusterScenario,
    progress: Progress = lambda share: None,
    first: Callable[[SharingPlan], None] = lambda plan: None,
) -> list[SharingPlan]:
    """Plans that differ and turn away as few as any, the cheapest first."""
    orders = _orders(len(scenario.jobs))
    plans: list[SharingPlan] = []
    quick = len(scenario.jobs) >= _MANY_JOBS  # groups are found much sooner, and cost more
    if quick:
        grouping = dataclasses.replace(scenario, policy=PolicyConfig(name="group"))
        first(_plan(grouping, orders[0], lambda share: None))
    for name in orders:
        done = len(plans)
        plans.append(_plan(scenario, name, _subprogress(progress, done, len(orders))))
        if not quick and not done:
            first(plans[0])
    fewest = min(len(plan.turned_away) for plan in plans)
    kept: dict[tuple[frozenset[frozenset[JobId]], float], SharingPlan] = {}
    for plan in sorted(plans, key=lambda plan: plan.price_per_h):
        if len(plan.turned_away) == fewest:
            who = frozenset(
                frozenset(start.job for start in starts) for starts in plan.groups().values()
            )
            kept.setdefault((who, plan.price_per_h), plan)
    return list(kept.values())


def _subprogress(progress: Progress, done: int, of: int) -> Progress:
    """Progress within one of several equal parts."""
    return lambda share: progress((done + share) / of)


def _orders(jobs: int) -> list[str]:
    """Those that are tried: fewer of them for many jobs, the one that wins most often first."""
    names = sorted(_ORDERS, key=lambda name: name != "longest iteration first")
    if jobs >= 2 * _MANY_JOBS:
        return names[:1]
    return names[:2] if jobs >= _MANY_JOBS else list(_ORDERS)


def _plan(scenario: ClusterScenario, order: str, progress: Progress) -> SharingPlan:
    fleet = scenario.view()
    never = {
        spec.job: UnplacedJob(spec.job, why, for_good=True)
        for spec in scenario.jobs
        if (why := _exclusion_reason(spec.profile, fleet)) is not None
    }
    fitting = [spec for spec in scenario.jobs if spec.job not in never]
    if not fitting:
        return SharingPlan(order, scenario.jobs, {}, tuple(never.values()), 0.0, 0.0)
    jobs = _as_a_backlog(sorted(fitting, key=_ORDERS[order]))
    controller = new_controller(scenario)
    starts: dict[JobId, StartJob] = {}
    away: dict[JobId, UnplacedJob] = dict(never)
    rented: set[NodeId] = set()
    for number, spec in enumerate(jobs):
        progress(number / len(jobs))
        for command in controller.handle(JobArrived(spec.arrival_s, spec)):
            match command:
                case StartJob(job=job):
                    starts[job] = command
                    away.pop(job, None)
                case HoldJob(job=job, reason=reason):
                    away[job] = UnplacedJob(job, reason, for_good=False)
                case RefuseJob(job=job, reason=reason):
                    away[job] = UnplacedJob(job, reason, for_good=True)
                case RentNodes(nodes=nodes):
                    rented.update(nodes)
                case ReturnNodes(nodes=nodes):
                    rented.difference_update(nodes)
    controller.check_integrity()
    return SharingPlan(
        order,
        (*jobs, *(spec for spec in scenario.jobs if spec.job in never)),
        starts,
        tuple(away.values()),
        fleet.rent_per_h(sorted(rented)),
        sum(fleet.solo_price_per_h(spec.profile) for spec in jobs if spec.job in starts),
    )


def _exclusion_reason(profile: JobProfile, fleet: FleetView) -> str | None:
    for name in ("rollout_s", "train_s", "sync_s"):
        length_s = getattr(profile, name)
        least_s = 0.0 if name == "sync_s" else _SHORTEST_PHASE_S
        if not least_s <= length_s <= _LONGEST_PHASE_S:
            return (
                f"its {name} is {length_s:g}, and a plan takes {least_s:g} to "
                f"{_LONGEST_PHASE_S:g} s; check the unit"
            )
    profile = fleet.with_node_counts(profile)
    why = fleet.with_parts(*fleet.parts(profile)).explain_infeasible(profile)
    return None if why is None else f"fits nowhere: it {why}"


def _as_a_backlog(jobs: Sequence[JobSpec]) -> tuple[JobSpec, ...]:
    """All come now, in this order, with iterations for some cycles of the longest: they run side by
    side throughout. Beside a far longer one, a job makes as many as there is room for.
    """
    most = max(_CYCLES, _MOST_ITERATIONS // len(jobs))
    longest_s = max(spec.profile.solo_s * spec.slo for spec in jobs)
    return tuple(
        dataclasses.replace(
            spec,
            arrival_s=number * _APART_S,
            iterations=min(max(1, round(_CYCLES * longest_s / spec.profile.solo_s)), most),
        )
        for number, spec in enumerate(jobs)
    )
