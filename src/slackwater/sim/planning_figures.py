"""A sharing plan in figures: groups, slowdowns as a run of it showed them, and dollars alone against shared."""

from typing import Any

from slackwater.control.coschedule.commands import StartJob
from slackwater.model.ids import JobId
from slackwater.model.job import JobSpec
from slackwater.model.placement import Phase
from slackwater.policy.fleet import Fleet
from slackwater.sim.cluster.report import RunReport
from slackwater.sim.planning import SharingPlan


def plan_figures(plan: SharingPlan, fleet: Fleet, report: RunReport) -> dict[str, Any]:
    """Plain data. `work_per_dollar` is iterations per dollar, against every job on nodes of its own."""
    iteration_s = iteration_lengths(report)
    speeds = [spec.profile.solo_s / iteration_s[spec.job] for spec in plan.placed]
    price, alone = plan.price_per_h, plan.alone_price_per_h
    return {
        "jobs": len(plan.jobs),
        "placed": len(plan.placed),
        "price_per_h": price,
        "alone_price_per_h": alone,
        "saved_per_h": alone - price,
        "times_cheaper": alone / price if price else None,
        "work_per_dollar": sum(speeds) / len(speeds) * alone / price if price else None,
        "slo_attainment": report.slo_attainment,
        "order": plan.order,
        "groups": [
            _group(name, starts, plan, fleet, iteration_s) for name, starts in plan.groups().items()
        ],
        "refusals": [
            {"job": away.job, "reason": away.reason, "for_good": away.for_good}
            for away in plan.turned_away
        ],
    }


def iteration_lengths(report: RunReport) -> dict[JobId, float]:
    """Mean seconds an iteration took while all jobs ran: from one end of training to the next, until the first job left."""
    together_s = min(row.finished_s or report.end_s for row in report.jobs)
    ends: dict[JobId, set[float]] = {}
    for span in report.spans:
        if span.phase is Phase.TRAIN and span.kind == "run" and span.end_s <= together_s:
            ends.setdefault(span.job, set()).add(span.end_s)
    lengths = {}
    for row in report.jobs:
        seen = sorted(ends.get(row.job, ()))
        many = len(seen) > 1
        lengths[row.job] = (
            (seen[-1] - seen[0]) / (len(seen) - 1) if many else row.elapsed_s / row.iterations
        )
    return lengths


def _group(
    name: str,
    starts: list[StartJob],
    plan: SharingPlan,
    fleet: Fleet,
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
        "price_per_h": fleet.price_per_h(len(rollout), len(train)),
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
