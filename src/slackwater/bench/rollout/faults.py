"""A thousand simulated hours of random faults over many seeds, the invariants checked after every event.

A seed that fails is named in the error, and run again by `slackwater storm --seed N`.
"""

import os
from concurrent.futures import ProcessPoolExecutor, as_completed

from slackwater.bench.options import BenchOptions
from slackwater.model.errors import RefusedError
from slackwater.sim.rollout.storm import StormReport, weather

HOURS_PER_SEED = 5.0
SEEDS = 200
QUICK_SEEDS = 4


def _weather(seed: int) -> StormReport | str:
    try:
        return weather(seed, HOURS_PER_SEED)
    except AssertionError as error:
        return f"seed {seed}: {error}"


def run(options: BenchOptions) -> dict[str, float]:
    """Figures over all seeds; an error that names the first failing seed if there is one."""
    seeds = range(options.seed, options.seed + (QUICK_SEEDS if options.quick else SEEDS))
    reports: list[StormReport] = []
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for future in as_completed([pool.submit(_weather, seed) for seed in seeds]):
            result = future.result()
            if isinstance(result, str):
                pool.shutdown(cancel_futures=True)
                again = f"run it again: slackwater storm --hours {HOURS_PER_SEED:g} --seed N"
                raise RefusedError(f"an invariant did not hold: {result} ({again})")
            reports.append(result)
            options.progress("storms", len(reports) / len(seeds))
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
