"""Five hundred simulated hours of node loss, partitions and agents that lie over all controllers together.

The invariants of every controller, and those between them, are checked after every event. A seed that fails is named in the
error, and run again by `slackwater storm --joint --seed N`.
"""

import os
from concurrent.futures import ProcessPoolExecutor, as_completed

from slackwater.bench.options import BenchOptions
from slackwater.model.errors import RefusedError
from slackwater.sim.joint.weather import JointReport, joint_weather

HOURS_PER_SEED = 10.0
SEEDS = 50
QUICK_SEEDS = 4


def _weather(seed: int) -> JointReport | str:
    try:
        return joint_weather(seed, HOURS_PER_SEED)
    except AssertionError as error:
        return f"seed {seed}: {error}"


def run(options: BenchOptions) -> dict[str, float]:
    """Figures over all seeds; an error that names the first failing seed if there is one."""
    seeds = range(options.seed, options.seed + (QUICK_SEEDS if options.quick else SEEDS))
    reports: list[JointReport] = []
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for future in as_completed([pool.submit(_weather, seed) for seed in seeds]):
            result = future.result()
            if isinstance(result, str):
                pool.shutdown(cancel_futures=True)
                again = f"slackwater storm --joint --hours {HOURS_PER_SEED:g} --seed N"
                raise RefusedError(f"an invariant did not hold: {result} (run it again: {again})")
            reports.append(result)
            options.progress("storms", len(reports) / len(seeds))
    totals = ("events", "jobs", "finished_jobs", "iterations", "completed_turns", "moved_turns")
    troubles = ("tail_migrations", "pulls", "nodes_lost", "partitions", "crashes", "lies")
    return {
        "violations": 0.0,
        "simulated_hours": sum(report.hours for report in reports),
        "seeds": float(len(reports)),
        **{
            name: float(sum(getattr(report, name) for report in reports))
            for name in (*totals, *troubles)
        },
    }
