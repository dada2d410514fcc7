"""A sharing plan in figures: groups, measured slowdowns, and dollars alone and shared."""

from typing import Any

from slackwater.control.coschedule.commands import StartJob
from slackwater.model.ids import JobId
from slackwater.model.job import JobSpec
from slackwater.policy.placement.fleet import FleetView
from slackwater.sim.planning.sharing_plan import MeasuredPlan, SharingPlan


def plan_figures(measured: MeasuredPlan, fleet: FleetView) -> dict[str, Any]:
    """Plain data; `work_per_dollar` is relative to every job on nodes of its own."""
    plan = measured.plan
    iteration_s = measured.iteration_s()
    price, alone = plan.price_per_h, plan.alone_price_per_h
    return {
        "jobs": len(plan.jobs),
        "placed": len(plan.placed),
        "price_per_h": price,
        "alone_price_per_h": alone,
        "saved_per_h": alone - price,
        "times_cheaper": alone / price,
        "work_per_dollar": measured.work_per_dollar(),
        "slo_attainment": measured.report.slo_attainment,
        "order": plan.order,
        "groups": [
            _group(name, starts, plan, fleet, iteration_s) for name, starts in plan.groups().items()
        ],
        "refusals": [
            {"job": away.job, "reason": away.reason, "for_good": away.for_good}
            for away in plan.turned_away
        ],
    }


def _group(
    name: str,
    starts: list[StartJob],
    plan: SharingPlan,
    fleet: FleetView,
    iteration_s: dict[JobId, float],
) -> dict[str, Any]:
    specs = {spec.job: spec for spec in plan.placed}
    train = sorted({node for start in starts for node in start.train_nodes})
    # A co-located job rolls out on its train nodes.
    rollout = sorted({node for start in starts for node in start.rollout_nodes} - set(train))
    return {
        "group": name,
        "rollout_nodes": rollout,
        "train_nodes": train,
        "price_per_h": fleet.rent_per_h((*rollout, *train)),
        "jobs": [_job(start, specs[start.job], iteration_s[start.job]) for start in starts],
    }


def _job(start: StartJob, spec: JobSpec, iteration_s: float) -> dict[str, Any]:
    slowdown = iteration_s / spec.profile.solo_s
    return {
        "job": start.job,
        "placed_by": start.strategy.value,
        "why": start.reason,
        "rollout_nodes": list(start.rollout_nodes),
        "train_nodes": list(start.train_nodes),
        "solo_s": spec.profile.solo_s,
        "iteration_s": iteration_s,
        "slowdown": slowdown,
        "slo": spec.slo,
        "kept_slo": slowdown <= spec.slo * (1 + 1e-9),
    }
