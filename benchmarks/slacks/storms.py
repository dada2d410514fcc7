"""A thousand simulated hours of a fleet with all five kinds of slack, and faults in each.

The invariants of every controller, and those between them, are checked after every event. A seed
that fails is named in the error.
"""

from benchmarks.options import BenchOptions
from benchmarks.seeds import run_seeds
from benchmarks.slacks.contributions import FLEET
from benchmarks.slacks.storm import SlackStorm, SlackStormReport
from slackwater.sim.slacks.scenario import read_slack_scenario

HOURS_PER_SEED = 5.0
SEEDS = 220
QUICK_SEEDS = 4


def slack_storm(seed: int, hours: float) -> SlackStormReport:
    """Run one storm."""
    return SlackStorm(read_slack_scenario(FLEET), seed, hours).run()


def run(options: BenchOptions) -> dict[str, float]:
    """Figures over all seeds; an error that names the first failing seed if there is one."""
    reports = run_seeds(
        options,
        slack_storm,
        seeds=QUICK_SEEDS if options.quick else SEEDS,
        hours=HOURS_PER_SEED,
        again="slackwater storm --slacks examples/five_slacks/fleet.toml",
    )
    faults = sorted({name for report in reports for name in report.faults})
    return {
        "violations": 0.0,
        "simulated_hours": sum(report.hours for report in reports),
        "seeds": float(len(reports)),
        "kinds_seen": float(min(report.kinds for report in reports)),
        **{
            name: float(sum(getattr(report, name) for report in reports))
            for name in ("events", "jobs", "moved_turns", "loans")
        },
        **{name: float(sum(report.faults[name] for report in reports)) for name in faults},
    }
