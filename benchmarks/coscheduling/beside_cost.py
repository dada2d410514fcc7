"""What stands beside every cost: how far SLOs were kept, by both meanings, how much jobs were
slowed, how often they moved, how long they took and queued.
"""

from collections.abc import Iterable

from slackwater.sim.cluster.report import RunReport
from slackwater.sim.cluster.summary import mean_slowdown


def beside_cost(report: RunReport) -> dict[str, float]:
    """Figures of one run. A cost alone can be bought with slower jobs or with the
    weaker promise.
    """
    return {
        "cost_per_h": report.cost_per_h,
        "slo_attainment": report.slo_attainment,
        "slo_attainment_realised": report.slo_attainment_realised,
        "iterations_in_bound": report.iterations_in_bound_share,
        "mean_slowdown": mean_slowdown(report) or 0.0,
        "moves": report.moves,
        "shortest_stay_s": report.end_s
        if report.shortest_stay_s is None
        else report.shortest_stay_s,
        "completion_mean_h": _mean_h(
            row.finished_s - row.arrival_s for row in report.jobs if row.finished_s is not None
        ),
        "queued_mean_h": _mean_h(row.queued_s for row in report.jobs),
    }


def _mean_h(times_s: Iterable[float]) -> float:
    values = list(times_s)
    return sum(values) / len(values) / 3600 if values else 0.0
