"""What each kind of slack brings: the shipped fleet with every kind on and off, over seeds, and the
live demo beside what a simulation of it predicts (`predicted_over_live_min`, `_max`).

`KIND_cost`, `KIND_completed_s`, `KIND_jobs_in_slo` and `KIND_attainment` are what a kind adds, by
Shapley, with its least and most over the seeds.
"""

from pathlib import Path

from benchmarks.options import BenchOptions
from benchmarks.slacks.live import live_figures
from slackwater.sim.slacks.contributions import SlackStudy, all_combinations
from slackwater.sim.slacks.scenario import read_slack_scenario

PARTS = ("simulated", "live")
FLEET = Path(__file__).parents[2] / "examples" / "five_slacks" / "fleet.toml"


def run(options: BenchOptions) -> dict[str, float]:
    """The simulated fleet (`--part simulated`) and the live demo (`--part live`)."""
    figures: dict[str, float] = {}
    if options.wants("simulated"):
        figures |= _simulated(options)
    if options.wants("live"):
        live = live_figures(options)
        kinds = min(live["kinds_seen"], figures.get("kinds_seen", 5.0))
        figures |= {**live, "kinds_seen": kinds}
    return figures


def _simulated(options: BenchOptions) -> dict[str, float]:
    """Figures of no slack and of all, and each kind's contribution with its spread over seeds."""
    study = SlackStudy(read_slack_scenario(FLEET), options.seed)
    for seed in range(options.seed, options.seed + (1 if options.quick else 3)):

        def moved(share: float, seed: int = seed) -> None:
            options.progress(f"seed {seed}", share)

        study.run([seed], all_combinations(), options.processes, moved)
    found = study.figures()
    figures = {name: float(found[name]) for name in ("seeds", "kinds_seen")}
    for name in ("none", "all"):
        figures |= {f"{name}_{key}": value for key, value in found[name].items()}
    for kind, row in found["kinds"].items():
        for measure, values in row.items():
            figures |= {f"{kind}_{measure}_{key}": value for key, value in values.items()}
    return figures
