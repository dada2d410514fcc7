"""A sharing plan in figures: groups, slowdowns, and dollars alone against shared."""

from typing import Any

from slackwater.model.placement import Placement
from slackwater.policy.fleet import Fleet
from slackwater.sim.cluster.report import JobRow, RunReport
from slackwater.sim.planning import SharingPlan


def plan_figures(plan: SharingPlan, fleet: Fleet, report: RunReport) -> dict[str, Any]:
    """Plain data. `work_per_dollar` is iterations per dollar against every job on nodes of its own."""
    rows = {row.job: row for row in report.jobs}
    slowdowns = [rows[spec.job].slowdown_realised for spec in plan.placed]
    speed = sum(1 / slowdown for slowdown in slowdowns) / len(slowdowns) if slowdowns else 0.0
    price, alone = plan.price_per_h, plan.alone_price_per_h
    return {
        "jobs": len(plan.order),
        "placed": len(plan.placed),
        "price_per_h": price,
        "alone_price_per_h": alone,
        "saved_per_h": alone - price,
        "times_cheaper": alone / price if price else None,
        "work_per_dollar": speed * alone / price if price else None,
        "slo_attainment": report.slo_attainment,
        "orders_tried": plan.orders_tried,
        "groups": [
            _group(name, placements, plan, fleet, rows)
            for name, placements in plan.groups().items()
        ],
        "refusals": [
            {"job": refusal.job, "reason": refusal.reason, "for_good": refusal.final}
            for refusal in plan.refusals
        ],
    }


def _group(
    name: str,
    placements: list[Placement],
    plan: SharingPlan,
    fleet: Fleet,
    rows: dict[Any, JobRow],
) -> dict[str, Any]:
    specs = {spec.job: spec for spec in plan.placed}
    rollout = sorted({node for placement in placements for node in placement.rollout_nodes})
    train = sorted({node for placement in placements for node in placement.train_nodes})
    rollout = [node for node in rollout if node not in train]  # co-located jobs roll out there
    return {
        "group": name,
        "rollout_nodes": rollout,
        "train_nodes": train,
        "price_per_h": fleet.price_per_h(len(rollout), len(train)),
        "jobs": [
            {
                "job": placement.job,
                "placed_by": placement.strategy.value,
                "why": placement.reason,
                "rollout_nodes": list(placement.rollout_nodes),
                "train_nodes": list(placement.train_nodes),
                "solo_s": specs[placement.job].profile.solo_s,
                "iteration_s": rows[placement.job].slowdown_realised
                * specs[placement.job].profile.solo_s,
                "slowdown": rows[placement.job].slowdown_realised,
                "slo": specs[placement.job].slo,
                "kept_slo": rows[placement.job].kept_slo,
            }
            for placement in placements
        ],
    }
