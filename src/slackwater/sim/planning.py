"""How given jobs should share a given fleet, and what that saves: the question behind `slackwater plan`.

Placement is online, so the order in which jobs come matters; a planner may choose it. A few orders are given to fresh
co-schedulers, and the one that turns away fewest and then pays least is kept. Plans are for the long run: jobs count as having many
iterations before them.
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
from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobSpec
from slackwater.model.node import Role
from slackwater.policy.fleet import Fleet
from slackwater.sim.cluster.scenario import ClusterScenario
from slackwater.sim.cluster.simulate import new_controller

_CYCLES = 24
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
class TurnedAway:
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
    turned_away: tuple[TurnedAway, ...]
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


def plan_sharing(scenario: ClusterScenario) -> SharingPlan:
    """The best of several orders for the scenario's jobs, as if all came at once."""
    plans = [_plan(scenario, name) for name in _ORDERS]
    return min(plans, key=lambda plan: (len(plan.turned_away), plan.price_per_h))


def _plan(scenario: ClusterScenario, order: str) -> SharingPlan:
    jobs = _as_a_backlog(sorted(scenario.jobs, key=_ORDERS[order]))
    fleet = Fleet(scenario.pool(Role.ROLLOUT), scenario.pool(Role.TRAIN))
    controller = new_controller(scenario)
    starts: dict[JobId, StartJob] = {}
    away: dict[JobId, TurnedAway] = {}
    rented: set[NodeId] = set()
    for spec in jobs:
        for command in controller.handle(JobArrived(spec.arrival_s, spec)):
            match command:
                case StartJob(job=job):
                    starts[job] = command
                    away.pop(job, None)
                case HoldJob(job=job, reason=reason):
                    away[job] = TurnedAway(job, reason, for_good=False)
                case RefuseJob(job=job, reason=reason):
                    away[job] = TurnedAway(job, reason, for_good=True)
                case RentNodes(nodes=nodes):
                    rented.update(nodes)
                case ReturnNodes(nodes=nodes):
                    rented.difference_update(nodes)
    controller.check_integrity()
    rollout = sum(node.startswith("rollout") for node in rented)
    return SharingPlan(
        order,
        jobs,
        starts,
        tuple(away.values()),
        fleet.price_per_h(rollout, len(rented) - rollout),
        sum(
            fleet.price_per_h(spec.profile.rollout_nodes, spec.profile.train_nodes)
            for spec in jobs
            if spec.job in starts
        ),
    )


def _as_a_backlog(jobs: Sequence[JobSpec]) -> tuple[JobSpec, ...]:
    """All come now, in this order, with iterations enough for some cycles of the longest: they run side by side throughout."""
    longest_s = max(spec.profile.solo_s * spec.slo for spec in jobs)
    return tuple(
        dataclasses.replace(
            spec,
            arrival_s=number * _APART_S,
            iterations=max(1, round(_CYCLES * longest_s / spec.profile.solo_s)),
        )
        for number, spec in enumerate(jobs)
    )
