"""How given jobs should share a given fleet, and what that saves: the question behind `slackwater plan`.

Placement is online, so the order in which jobs come matters; a planner may choose it. A few orders are tried on fresh
policies and the cheapest that turns away fewest is kept; the kept plan is then run in virtual time, at worst-case
lengths, to see what each job's iterations really take.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slackwater.model.ids import JobId
from slackwater.model.job import JobSpec
from slackwater.model.placement import Placement, Refusal
from slackwater.policy.catalogue import make_policy
from slackwater.policy.fleet import Fleet

_CYCLES_MEASURED = 24


@dataclass(frozen=True, slots=True)
class SharingPlan:
    """Where every job goes, which are turned away and why, and the fleet's price."""

    order: tuple[JobSpec, ...]
    placements: Mapping[JobId, Placement]
    refusals: tuple[Refusal, ...]
    price_per_h: float
    alone_price_per_h: float
    orders_tried: int

    @property
    def placed(self) -> tuple[JobSpec, ...]:
        """Jobs that have nodes, in the order they were placed."""
        return tuple(spec for spec in self.order if spec.job in self.placements)

    def groups(self) -> dict[str, list[Placement]]:
        """Placements by group, in order of first use."""
        found: dict[str, list[Placement]] = {}
        for spec in self.placed:
            placement = self.placements[spec.job]
            found.setdefault(placement.group, []).append(placement)
        return found


_ORDERS: Mapping[str, Callable[[JobSpec], float]] = {
    "longest iteration first": lambda spec: -spec.profile.solo_s,
    "shortest iteration first": lambda spec: spec.profile.solo_s,
    "tightest SLO first": lambda spec: spec.slo,
    "most nodes first": lambda spec: -(spec.profile.rollout_nodes + spec.profile.train_nodes),
}


def plan_sharing(
    jobs: Sequence[JobSpec], fleet: Fleet, policy: str, options: Mapping[str, float], seed: int = 0
) -> SharingPlan:
    """The best of several orders of placement: fewest jobs turned away, then least paid per hour."""
    together = [dataclasses.replace(spec, arrival_s=0.0) for spec in jobs]
    orders = [together, *(sorted(together, key=key) for key in _ORDERS.values())]
    plans = [_placed(order, fleet, policy, options, seed, len(orders)) for order in orders]
    return min(plans, key=lambda plan: (len(plan.refusals), plan.price_per_h))


def measured_jobs(plan: SharingPlan) -> tuple[JobSpec, ...]:
    """The placed jobs with iterations enough for some cycles of the longest, so that all run side by side throughout."""
    longest_s = max((spec.profile.solo_s * spec.slo for spec in plan.placed), default=0.0)
    return tuple(
        dataclasses.replace(
            spec, iterations=max(1, round(_CYCLES_MEASURED * longest_s / spec.profile.solo_s))
        )
        for spec in plan.placed
    )


def _placed(
    order: Sequence[JobSpec],
    fleet: Fleet,
    policy_name: str,
    options: Mapping[str, float],
    seed: int,
    tried: int,
) -> SharingPlan:
    policy = make_policy(policy_name, fleet, options, seed)
    placements: dict[JobId, Placement] = {}
    refusals: list[Refusal] = []
    for spec in order:
        answer = policy.place(spec, 0.0)
        if isinstance(answer, Refusal):
            refusals.append(answer)
        else:
            placements[spec.job] = answer
    policy.check_integrity()
    alone = sum(
        fleet.price_per_h(spec.profile.rollout_nodes, spec.profile.train_nodes)
        for spec in order
        if spec.job in placements
    )
    return SharingPlan(
        tuple(order), placements, tuple(refusals), policy.hourly_cost(), alone, tried
    )
