"""A thousand simulated hours of random faults over many seeds, the invariants checked after every
event.

A seed that fails is named in the error; `weather(seed, hours)` runs it again.
"""

from benchmarks.options import BenchOptions
from benchmarks.rollout.storm import weather
from benchmarks.seeds import run_seeds

HOURS_PER_SEED = 5.0
SEEDS = 200
QUICK_SEEDS = 4


def run(options: BenchOptions) -> dict[str, float]:
    """Figures over all seeds; an error that names the first failing seed if there is one."""
    reports = run_seeds(
        options,
        weather,
        seeds=QUICK_SEEDS if options.quick else SEEDS,
        hours=HOURS_PER_SEED,
        again="benchmarks.rollout.storm.weather",
    )
    return {
        "violations": 0.0,
        "simulated_hours": sum(report.hours for report in reports),
        "seeds": float(len(reports)),
        "events": float(sum(report.events for report in reports)),
        "completed_turns": float(sum(report.completed_turns for report in reports)),
        "failed_turns": float(sum(report.failed_turns for report in reports)),
        "moved_turns": float(sum(report.moved_turns for report in reports)),
        "instances": float(sum(report.instances for report in reports)),
        "late_tokens_discarded": float(sum(report.late_tokens for report in reports)),
        "faults_reported": float(sum(report.faults_reported for report in reports)),
    }
