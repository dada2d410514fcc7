"""bench joint_storm: a thousand simulated hours of trouble over the wiring that runs live: co-scheduler, rollout manager, weight director and books in one brain.

Nodes are lost and cut off, jobs crash, agents lie. All invariants are checked after every event; at the end of each storm every
job that was taken in has made all its iterations, and nothing of it is left.
"""

from slackwater.bench.options import BenchOptions
from slackwater.sim.joint.weather import JointReport, joint_weather

_HOURS_A_STORM = 5.0


def run(options: BenchOptions) -> dict[str, object]:
    """Storms from the seed on, until so many hours have gone by."""
    wanted_h = 10.0 if options.quick else 1000.0
    reports: list[JointReport] = []
    broken: list[str] = []
    seed, hours = options.seed, 0.0
    while hours < wanted_h:
        options.progress(f"seed {seed}", hours / wanted_h)
        try:
            report = joint_weather(seed, _HOURS_A_STORM)
        except AssertionError as error:
            broken.append(f"seed {seed}: {error}")
            hours += _HOURS_A_STORM
        else:
            reports.append(report)
            hours += report.hours
        seed += 1
    names = ("events", "jobs", "finished_jobs", "iterations", "completed_turns", "moved_turns")
    troubles = ("tail_migrations", "pulls", "nodes_lost", "partitions", "crashes", "lies")
    sums = {name: sum(getattr(r, name) for r in reports) for name in (*names, *troubles)}
    return {
        "seeds": seed - options.seed,
        "hours": round(hours, 1),
        "storm_hours": _HOURS_A_STORM * (seed - options.seed),
        **sums,
        "broken": broken,
    }
