"""What stands beside every cost: how far SLOs were kept, by both meanings, how much jobs were
slowed, how often they moved, how long they took and queued.
"""

from collections.abc import Iterable

from slackwater.sim.cluster.report import RunReport
from slackwater.sim.cluster.summary import mean_slowdown


def beside_cost(key: str, report: RunReport) -> dict[str, float]:
    """Figures of one run under `key`. A cost alone can be bought with slower jobs or with the
    weaker promise.
    """
    return {
        f"{key}.cost_per_h": report.cost_per_h,
        f"{key}.slo_attainment": report.slo_attainment,
        f"{key}.slo_attainment_realised": report.slo_attainment_realised,
        f"{key}.iterations_in_bound": report.iterations_in_bound_share,
        f"{key}.mean_slowdown": mean_slowdown(report) or 0.0,
        f"{key}.moves": report.moves,
        f"{key}.completion_mean_h": _mean_h(
            row.finished_s - row.arrival_s for row in report.jobs if row.finished_s is not None
        ),
        f"{key}.queued_mean_h": _mean_h(row.queued_s for row in report.jobs),
    }


def _mean_h(times_s: Iterable[float]) -> float:
    values = list(times_s)
    return sum(values) / len(values) / 3600 if values else 0.0
