"""Reports as plain data: one run, and several policies side by side."""

from collections.abc import Sequence
from typing import Any

from slackwater.model.config import plain
from slackwater.sim.cluster.report import PoolUse, RunReport

BASELINE = "solo"


def run_summary(report: RunReport) -> dict[str, Any]:
    """Totals and one row per job; no spans."""
    return {
        **totals(report),
        "admissions": dict(report.admissions),
        "refusals": [{"job": job, "reason": reason} for job, reason in report.refusals],
        "jobs": [{**plain(row), "slowdown_realised": row.slowdown_realised} for row in report.jobs],
    }


def totals(report: RunReport) -> dict[str, Any]:
    """The totals of a run: one line of a comparison."""
    return {
        "scenario": report.scenario,
        "policy": report.policy,
        "ordering": report.ordering,
        "seed": report.seed,
        "events": report.events,
        "end_s": report.end_s,
        "cost": report.cost,
        "cost_per_h": report.cost_per_h,
        "jobs_finished": report.finished,
        "jobs_total": len(report.jobs),
        "jobs_refused": len(report.refusals),
        "slo_attainment": report.slo_attainment,
        "slo_attainment_realised": report.slo_attainment_realised,
        "iterations_in_bound_share": report.iterations_in_bound_share,
        "slowdown_mean": mean_slowdown(report),
        "queued_mean_s": _mean([row.queued_s for row in report.jobs]),
        "rollout": _pool(report.rollout),
        "train": _pool(report.train),
        "switches": report.switches,
        "moves": report.moves,
        "tail_migrations": report.tail_migrations,
    }


def comparison(reports: Sequence[RunReport]) -> list[dict[str, Any]]:
    """Each policy's totals, and how many times less it costs than solo-disaggregated (than the
    dearest, if that did not run).
    """
    against = cost_baseline(reports)
    return [
        {**totals(report), "cost_vs": against.policy, "times_cheaper": ratio(against, report)}
        for report in reports
    ]


def cost_baseline(reports: Sequence[RunReport]) -> RunReport:
    """The run that costs are compared with."""
    solo = [report for report in reports if report.policy == BASELINE]
    return solo[0] if solo else max(reports, key=lambda report: report.cost)


def ratio(against: RunReport, report: RunReport) -> float | None:
    """How many times less `report` costs."""
    return against.cost / report.cost if report.cost else None


def mean_slowdown(report: RunReport) -> float | None:
    """Over finished jobs, against the same drawn lengths run alone."""
    done = [row.slowdown_realised for row in report.jobs if row.finished_s is not None]
    return _mean(done) if done else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _pool(use: PoolUse) -> dict[str, Any]:
    return {**plain(use), "bubble_share": use.bubble_share}
