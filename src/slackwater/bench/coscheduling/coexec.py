"""bench coexec: real GRPO jobs that share one training core and one rollout core, against each alone in turn on the same cores.

One service, two nodes: an engine on one core, a trainer on the other; control plane and drivers run on both. Alone a job is submitted without a
profile, so it is profiled live; together jobs come with what was measured of them alone. Their drivers are plain clients of the SDK. Rates are taken over
the time in which all jobs of a run made steps, after their first few. A machine's speed drifts within minutes, so each job runs alone both before and after the jobs
together, and the mean of both counts. The joint simulator is given what was measured alone.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from slackwater.bench.coscheduling.coexec_prediction import both_cores_slow, predicted_throughput
from slackwater.bench.coscheduling.coexec_shop import Run, Shape, Shop
from slackwater.bench.options import BenchOptions
from slackwater.cli.own_service import own_service
from slackwater.control.coschedule.settings import CoscheduleSettings
from slackwater.zoo.tiny import make_model

_SLO = 2.0
# Rollout and training take about as long.
_SHAPE = Shape(groups=2, answers=5, tokens=96)
_LIMIT_S = 150.0
_SETTINGS = CoscheduleSettings(placement="ours", tails=False)

_FLEET = """
[[pools]]
name = "rollout"
engines = 1
[[pools]]
name = "train"
engines = 0
trainers = 1
[[nodes]]
name = "r0"
pool = "rollout"
cores = [{rollout}]
[[nodes]]
name = "t0"
pool = "train"
cores = [{train}]
"""


def run(options: BenchOptions) -> dict[str, object]:
    """Three jobs alone, two together, three together, and the three alone again."""
    steps = 6 if options.quick else 8
    cores = sorted(os.sched_getaffinity(0))
    options.progress("how much two cores slow each other", 0.0)
    both_slow = both_cores_slow((cores[0], cores[-1]), 1.0 if options.quick else 4.0)
    with tempfile.TemporaryDirectory(prefix="slackwater-coexec-") as made:
        folder = Path(made)
        make_model("medium", folder / "model", options.seed)
        fleet = folder / "fleet.toml"
        fleet.write_text(_FLEET.format(rollout=cores[0], train=cores[-1]))
        with own_service(
            *(folder / "state", "job", folder / "model", "--fleet", str(fleet)),
            *("--set", f"coschedule.placement={_SETTINGS.placement}"),
            *("--set", "coschedule.tails=false"),
        ) as (url, key):
            shop = Shop(url, key, folder, _SHAPE, _SLO)
            try:
                before = _each_alone(shop, "before", steps, options, 0.1)
                options.progress("two together", 0.4)
                two = shop.run("two", [0, 1], steps, _LIMIT_S, before)
                options.progress("three together", 0.55)
                three = shop.run("three", [0, 1, 2], steps, _LIMIT_S, before)
                after = _each_alone(shop, "after", steps, options, 0.75)
            finally:
                shop.close()
    figures: dict[str, object] = {"slo": _SLO, "placement": _SETTINGS.placement}
    figures["two_cores_slow_each_other"] = round(both_slow, 3)
    figures["alone"] = [_shown(one) for one in before]
    figures["alone_after"] = [_shown(one) for one in after]
    alone = (before, after)
    figures |= _together("two", two, alone, both_slow) | _together("three", three, alone, both_slow)
    figures["predicted_over_live"] = figures["two_jobs_predicted_over_live"]
    permits = three.state["permits"]
    figures |= {f"permit_{name}": permits[name] for name in ("p50_ms", "p99_ms")}
    figures["permits"], figures["switches"] = permits["given"], permits["switches"]
    figures["different"] = sum(
        result.differs(before[result.seed].results[0])
        for run in (two, three, *after)
        for result in run.results
    )
    return figures


def _each_alone(shop: Shop, when: str, steps: int, options: BenchOptions, done: float) -> list[Run]:
    found = []
    for seed in (0, 1, 2):
        options.progress(f"job {seed} alone, {when} the jobs together", done + 0.08 * seed)
        found.append(shop.run(f"alone-{when}", [seed], steps, _LIMIT_S))
    return found


def _shown(run: Run) -> dict[str, object]:
    """Where a run's time went: means of its jobs' iterations, and processors used by role."""
    return {
        "jobs": [times.rounded() for times in run.account.jobs.values()],
        "processors": {role: round(used, 3) for role, used in sorted(run.used.items())},
        "utilisation": {pool: round(used, 3) for pool, used in run.account.utilisation.items()},
    }


def _together(
    word: str, run: Run, alone: Sequence[Sequence[Run]], both_slow: float
) -> dict[str, object]:
    window = run.window()
    slowdowns = []
    for result in run.results:
        twins = [each[result.seed] for each in alone]
        step_s = mean(1 / twin.results[0].rate(*twin.window()) for twin in twins)
        slowdowns.append(1 / result.rate(*window) / step_s)
    live = sum(1 / slowdown for slowdown in slowdowns)
    jobs = len(run.results)
    predicted = mean(
        predicted_throughput(each[:jobs], _SETTINGS, _SLO, both_slow) for each in alone
    )
    return {
        f"{word}_jobs_throughput": round(live, 3),
        f"{word}_jobs_slowdowns": [round(slowdown, 3) for slowdown in slowdowns],
        f"{word}_jobs_past_slo": sum(slowdown > _SLO for slowdown in slowdowns),
        f"{word}_jobs_predicted": round(predicted, 3),
        f"{word}_jobs_predicted_over_live": round(predicted / live, 3),
        f"{word}_jobs": _shown(run),
    }
