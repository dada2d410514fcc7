"""Two thousand simulated hours of all faults together over the complete fleet controller, with the
live limits.

The invariants of every controller, and those between them, are checked after every event. A seed
that fails is named in the error, and run again by `slackwater storm --seed N`.
"""

from benchmarks.fleet.storm import fleet_storm
from benchmarks.options import BenchOptions
from benchmarks.seeds import run_seeds

HOURS_PER_SEED = 10.0
SEEDS = 200
QUICK_SEEDS = 4


def run(options: BenchOptions) -> dict[str, float]:
    """Figures over all seeds; an error that names the first failing seed if there is one."""
    reports = run_seeds(
        options,
        fleet_storm,
        seeds=QUICK_SEEDS if options.quick else SEEDS,
        hours=HOURS_PER_SEED,
        again="slackwater storm",
    )
    totals = ("events", "jobs", "finished_jobs", "iterations", "completed_turns", "moved_turns")
    troubles = (
        *("tail_migrations", "pulls", "loans", "state_moves", "nodes_lost", "trainers_lost"),
        *("engine_faults", "failed_turns", "partitions", "crashes", "lies"),
    )
    return {
        "violations": 0.0,
        "simulated_hours": sum(report.hours for report in reports),
        "seeds": float(len(reports)),
        **{
            name: float(sum(getattr(report, name) for report in reports))
            for name in (*totals, *troubles)
        },
    }
