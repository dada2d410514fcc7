"""bench coexec: real GRPO jobs that share one training core and one rollout core, against each
alone in turn on the same cores.

One service, two nodes: an engine on one core, a trainer on the other; control plane and drivers run
on both. Alone a job is submitted without a profile, so it is profiled live; together jobs come with
what was measured of them alone so far. Their drivers are plain clients of the SDK. Answers have all
the same length, so the jobs are balanced. Rates are taken over the time in which all jobs of a run
made steps, after their first few. A machine's speed drifts within minutes, so each job runs alone
both before and after the jobs together, and the mean of both counts. The joint simulator is given
what was measured alone.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.coscheduling.bare_phases import machine_ceiling
from benchmarks.coscheduling.coexec_prediction import predicted_throughput
from benchmarks.coscheduling.coexec_shop import JobResult, Run, Shape, Shop
from benchmarks.options import BenchOptions
from slackwater.cli.demo import two_nodes
from slackwater.cli.own_service import own_service
from slackwater.control.coschedule.settings import CoscheduleSettings
from slackwater.model.errors import UnavailableError
from slackwater.timeline.permit_account import Stretch
from slackwater.zoo.tiny import make_model

_SLO = 2.0
# Rollout and training take about as long.
_SHAPE = Shape(groups=2, answers=6, tokens=84)
_LIMIT_S = 240.0
_SETTINGS = CoscheduleSettings(placement="interleaving", tails=False)
_JOBS = (0, 1, 2)


def run(options: BenchOptions) -> dict[str, object]:
    """Three jobs alone, two together, three alone again, three together, and the three alone once
    more.
    """
    steps = 6 if options.quick else 10
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="slackwater-coexec-") as made:
        folder = Path(made)
        make_model("medium", folder / "model", options.seed)
        _let_answers_go_on(folder / "model")
        options.progress("what two cores take from each other", 0.0)
        ceiling = machine_ceiling(
            *((cores[0], cores[-1]), folder / "model", _SHAPE.groups * _SHAPE.answers),
            *(_SHAPE.tokens, *((1.0, 2) if options.quick else (2.0, 4))),
        )
        fleet = folder / "fleet.toml"
        fleet.write_text(two_nodes(cores[:1], cores[-1:]))
        with own_service(
            *(folder / "state", "job", folder / "model", "--fleet", str(fleet)),
            *("--set", f"coschedule.placement={_SETTINGS.placement}"),
            *("--set", "coschedule.tails=false"),
        ) as (url, key):
            shop = Shop(url, key, folder, _SHAPE, _SLO)
            runs = Runs(shop, steps, options)
            try:
                first = runs.each_alone("first", 0.05)
                options.progress("two together", 0.3)
                two = runs.made("two", _JOBS[:2], first)
                between = runs.each_alone("between", 0.4)
                options.progress("three together", 0.65)
                three = runs.made("three", _JOBS, first, between)
                last = runs.each_alone("last", 0.75)
                switches = shop.switches()
            finally:
                shop.close()
    figures: dict[str, object] = {"slo": _SLO, "placement": _SETTINGS.placement}
    figures["ceiling_two_jobs"] = round(ceiling, 3)
    for name, alone in (("alone", first), ("alone_between", between), ("alone_after", last)):
        figures[name] = [None if one is None else _shown(one) for one in alone]
    figures |= _together("two", two, (first, between), 2 / ceiling)
    figures |= _together("three", three, (between, last), 2 / ceiling)
    figures["predicted_over_live"] = figures["two_jobs_predicted_over_live"]
    figures |= _permits([*first, two, *between, three, *last], shop.permits)
    figures["switches"], figures["retaken"] = switches, shop.retaken
    figures["different"] = _different(shop.results)
    figures["missing"] = runs.missing
    return figures


class Runs:
    """Runs of a shop. One that fails, or takes too long, is missing; the others count.

    `missing` says why, by the run's name.
    """

    def __init__(self, shop: Shop, steps: int, options: BenchOptions) -> None:
        self._shop, self._steps, self._options = shop, steps, options
        self.missing: dict[str, str] = {}

    def made(self, name: str, seeds: Sequence[int], *alone: Sequence[Run | None]) -> Run | None:
        """Jobs with these seeds together; `alone` are their runs alone so far."""
        known = [[run for run in runs if run is not None] for runs in zip(*alone, strict=True)]
        try:
            return self._shop.run(name, seeds, self._steps, _LIMIT_S, known)
        except UnavailableError as error:
            self.missing[name if len(seeds) > 1 else f"{name}-{seeds[0]}"] = str(error)
            return None

    def each_alone(self, when: str, done: float) -> list[Run | None]:
        found = []
        for seed in _JOBS:
            self._options.progress(f"job {seed} alone, {when}", done + 0.08 * seed)
            found.append(self.made(f"alone-{when}", [seed]))
        return found


def _different(results: Sequence[JobResult]) -> int | None:
    """Answers and losses that are not those of the job's first run; None where no job ran twice."""
    first: dict[int, JobResult] = {}
    again = [result for result in results if first.setdefault(result.seed, result) is not result]
    return sum(result.differs(first[result.seed]) for result in again) if again else None


def _let_answers_go_on(model: Path) -> None:
    """A model without a token that ends an answer: a random one would draw it now and then, and
    jobs of one shape would differ by a tenth.
    """
    for name in ("config.json", "generation_config.json"):
        file = model / name
        kept = json.loads(file.read_text())
        kept.pop("eos_token_id", None)
        file.write_text(json.dumps(kept))


def _permits(runs: Sequence[Run | None], made: Sequence[Stretch]) -> dict[str, object]:
    """How long permits took in the runs that count, and in all that were made; of the slowest, what
    the service computed.
    """
    counted = [one for run in runs if run is not None for one in run.permits]
    figures: dict[str, object] = {"permits": len(counted)}
    for name, share in (("p50", 50), ("p99", 99)):
        figures[f"permit_{name}_ms"] = _percentile([one.granted_ms for one in counted], share)
        own_ms = [one.granted_own_ms for one in counted]
        figures[f"permit_own_{name}_ms"] = _percentile(own_ms, share)
    figures["permit_p99_ms_with_retaken"] = _percentile([one.granted_ms for one in made], 99)
    slowest = sorted(counted, key=lambda one: -one.granted_ms)[:5]
    figures["permit_slowest_ms"] = [[one.granted_ms, one.granted_own_ms] for one in slowest]
    return figures


def _percentile(values: Sequence[float], share: float) -> float | None:
    if not values:
        return None
    return round(float(np.percentile(values, share, method="lower")), 3)


def _shown(run: Run) -> dict[str, object]:
    """Where a run's time went: means of its jobs' iterations, and processors used by role."""
    return {
        "jobs": [times.figures() for times in run.account.jobs.values()],
        "processors": {role: round(used, 3) for role, used in sorted(run.used.items())},
        "utilisation": {pool: round(used, 3) for pool, used in run.account.utilisation.items()},
    }


def _present(runs: Sequence[Run | None]) -> list[Run]:
    return [run for run in runs if run is not None]


def _together(
    word: str, run: Run | None, alone: Sequence[Sequence[Run | None]], both_slow: float
) -> dict[str, object]:
    """Figures of jobs together.

    Those of jobs that never ran side by side, since one was held, are none; so are those for which
    a run is missing.
    """
    jobs = {"two": 2, "three": 3}[word]
    whole = [found for each in alone if len(found := _present(each[:jobs])) == jobs]
    predictions = [predicted_throughput(each, _SETTINGS, _SLO, both_slow) for each in whole]
    predicted = mean(predictions) if predictions else None
    figures: dict[str, object] = {
        f"{word}_jobs_throughput": None,
        f"{word}_jobs_slowdowns": None,
        f"{word}_jobs_past_slo": None,
        f"{word}_jobs_predicted": None if predicted is None else round(predicted, 3),
        f"{word}_jobs_predicted_over_live": None,
        f"{word}_jobs_held": None if run is None else run.held,
    }
    if run is None or predicted is None or not run.together:
        return figures
    window = run.window()
    slowdowns = []
    for result in run.results:
        twins = _present([each[result.seed] for each in alone])
        step_s = mean(1 / twin.results[0].rate(*twin.window()) for twin in twins)
        slowdowns.append(1 / result.rate(*window) / step_s)
    live = sum(1 / slowdown for slowdown in slowdowns)
    return figures | {
        f"{word}_jobs_throughput": round(live, 3),
        f"{word}_jobs_slowdowns": [round(slowdown, 3) for slowdown in slowdowns],
        f"{word}_jobs_past_slo": sum(slowdown > _SLO for slowdown in slowdowns),
        f"{word}_jobs_predicted_over_live": round(predicted / live, 3),
        f"{word}_jobs": _shown(run),
    }
