"""What stands beside every cost: how far SLOs were kept, by both meanings, how much jobs were
slowed, how often they moved.
"""

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
    }
