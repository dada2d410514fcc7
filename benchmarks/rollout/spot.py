"""One job on reserved nodes and spot instances over trace segments (RLBoost 6.2 to 6.4), rule
against rule.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from benchmarks.options import BenchOptions
from benchmarks.rollout.simulated.response_lengths import log_normal
from benchmarks.rollout.simulated.rules import SPOT_RULES
from benchmarks.rollout.simulated.spot_run import SETUPS, SpotSetup, run_spot
from benchmarks.rollout.spot_places import (
    SECONDS,
    SEGMENTS,
    ReturningInstances,
    held_out,
    segment,
)
from slackwater.model.spot_trace import SpotEvent

# Mathematics with reasoning at a limit of 14 K tokens (RLBoost 6.1): mean 5.9 K, 5 % at the limit.
REASONING = log_normal(4800.0, 0.75, 14_336.0)
NO_SPOT = "none"
RETURNING = "returning"
UNEVEN = "uneven"
UNEVEN_SLOWDOWN = 3.0
COMPARED = ("rlboost", "ours")
ABLATIONS = tuple(f"{rule}_{part}_off" for rule in COMPARED for part in ("seeding", "memory"))
ABLATED_MODEL = "14b"
QUICK_SECONDS = 2400.0
RETURNING_SEEDS = 2


@dataclass(frozen=True, slots=True)
class _Case:
    """One run: `group` is segment, held_out, or one of the two places above; measured from
    `since_s` on.
    """

    group: str
    model: str
    place: str
    rule: str
    trace: tuple[SpotEvent, ...]
    seconds: float
    seed: int
    since_s: float = 0.0
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class _Outcome:
    tokens_per_s: float
    tokens_per_dollar: float
    mean_remote: float


_Place = tuple[str, str]  # model, place
_Outcomes = dict[tuple[str, str, str], _Outcome]  # model, place, rule


def _run(case: _Case) -> _Outcome:
    shape, nodes = SETUPS[case.model]
    setup = SpotSetup(shape, nodes, REASONING, slowdown=case.slowdown)
    rules = SPOT_RULES[case.rule]
    result = run_spot(setup, rules, case.trace, seconds=case.seconds, seed=case.seed)
    rate = result.tokens_per_s_since(case.since_s)
    return _Outcome(rate, result.tokens_per_dollar, result.mean_remote)


def _segment_cases(options: BenchOptions) -> Iterable[_Case]:
    seconds = QUICK_SECONDS if options.quick else SECONDS
    seed = options.seed
    models = (ABLATED_MODEL,) if options.quick else tuple(SETUPS)
    for model in models:
        yield _Case(NO_SPOT, model, NO_SPOT, "colocated", (), seconds, seed)
        for name in ("B",) if options.quick else SEGMENTS:
            trace = segment(options, name)
            for rule in (*COMPARED, *(ABLATIONS if model == ABLATED_MODEL else ())):
                yield _Case("segment", model, name, rule, trace, seconds, seed)


def _held_out_cases(options: BenchOptions) -> Iterable[_Case]:
    """One model on each trace, in turn, with other responses."""
    seconds = QUICK_SECONDS if options.quick else SECONDS
    apart = list(held_out(options).items())
    for number, (name, trace) in enumerate(apart[:1] if options.quick else apart):
        model = tuple(SETUPS)[number % len(SETUPS)]
        for rule in COMPARED:
            yield _Case("held_out", model, name, rule, trace, seconds, options.seed + 1)


def _uneven_cases(options: BenchOptions) -> Iterable[_Case]:
    """Half of the spot instances are several times slower, for any reason: an old card, a busy
    neighbour.
    """
    seconds = QUICK_SECONDS if options.quick else SECONDS
    for name in ("B",) if options.quick else SEGMENTS:
        trace = segment(options, name)
        for rule in COMPARED:
            place = f"{UNEVEN}_{name}"
            yield _Case(
                UNEVEN,
                ABLATED_MODEL,
                place,
                rule,
                trace,
                seconds,
                options.seed,
                slowdown=UNEVEN_SLOWDOWN,
            )


def _returning_cases(options: BenchOptions) -> Iterable[_Case]:
    returning = ReturningInstances(1200.0, 600.0, 3) if options.quick else ReturningInstances()
    trace, end_s, lost_s = returning.trace(), returning.end_s, returning.lost_s
    for number in range(1 if options.quick else RETURNING_SEEDS):
        for rule in (*COMPARED, *ABLATIONS):
            place, seed = f"{RETURNING}{number}", options.seed + number
            yield _Case(RETURNING, ABLATED_MODEL, place, rule, trace, end_s, seed, lost_s)


def run(options: BenchOptions) -> dict[str, float]:
    """Throughput and cost efficiency of every rule; all rules see the same traces and responses."""
    cases = [
        *_segment_cases(options),
        *_held_out_cases(options),
        *_returning_cases(options),
        *_uneven_cases(options),
    ]
    outcomes: _Outcomes = {}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for case, outcome in zip(cases, pool.map(_run, cases), strict=True):
            outcomes[case.model, case.place, case.rule] = outcome
            options.progress(f"{case.model} {case.place} {case.rule}", len(outcomes) / len(cases))
    places = {
        group: sorted({(case.model, case.place) for case in cases if case.group == group})
        for group in ("segment", "held_out", RETURNING, UNEVEN)
    }
    return _figures(outcomes, places)


def _figures(outcomes: _Outcomes, places: dict[str, list[_Place]]) -> dict[str, float]:
    figures = _ours_over_rlboost(outcomes, places["segment"], "")
    figures |= _ours_over_rlboost(outcomes, places["held_out"], "held_out_")
    figures |= _ours_over_rlboost(outcomes, places[UNEVEN], f"{UNEVEN}_")
    for model in sorted({model for model, _ in places["segment"]}):
        mine = [place for place in places["segment"] if place[0] == model]
        for rule in COMPARED:
            name = f"{rule}_over_colocated_{model}"
            figures[name] = _mean_ratio(outcomes, mine, rule, "colocated")
            figures[f"{name}_cost"] = _mean_ratio(outcomes, mine, rule, "colocated", cost=True)
    ablated = [place for place in places["segment"] if place[0] == ABLATED_MODEL]
    for off in ABLATIONS:
        rule = off.split("_")[0]
        figures[f"{off}_over_{rule}"] = _mean_ratio(outcomes, ablated, off, rule)
        figures[f"{RETURNING}_{off}_over_{rule}"] = _mean_ratio(
            outcomes, places[RETURNING], off, rule
        )
    figures[f"{RETURNING}_ours_over_rlboost"] = _mean_ratio(
        outcomes, places[RETURNING], "ours", "rlboost"
    )
    for (model, place, rule), outcome in sorted(outcomes.items()):
        figures[f"{model}_{place}_{rule}_tokens_per_s"] = outcome.tokens_per_s
        figures[f"{model}_{place}_{rule}_tokens_per_dollar"] = outcome.tokens_per_dollar
        figures[f"{model}_{place}_{rule}_mean_spot_instances"] = outcome.mean_remote
    return figures


def _ours_over_rlboost(
    outcomes: _Outcomes, places: Sequence[_Place], prefix: str
) -> dict[str, float]:
    rates = _ratios(outcomes, places, "ours", "rlboost")
    costs = _ratios(outcomes, places, "ours", "rlboost", cost=True)
    return {
        f"{prefix}ours_over_rlboost_mean": float(np.mean(rates)),
        f"{prefix}ours_over_rlboost_min": min(rates),
        f"{prefix}ours_over_rlboost_cost_mean": float(np.mean(costs)),
        f"{prefix}ours_over_rlboost_cost_min": min(costs),
    }


def _mean_ratio(
    outcomes: _Outcomes, places: Sequence[_Place], rule: str, over: str, *, cost: bool = False
) -> float:
    return float(np.mean(_ratios(outcomes, places, rule, over, cost=cost)))


def _ratios(
    outcomes: _Outcomes, places: Sequence[_Place], rule: str, over: str, *, cost: bool = False
) -> list[float]:
    """At each place, the rule's figure over the other's."""

    def figure(place: _Place, name: str) -> float:
        outcome = outcomes[place[0], NO_SPOT if name == "colocated" else place[1], name]
        return outcome.tokens_per_dollar if cost else outcome.tokens_per_s

    return [figure(place, rule) / figure(place, over) for place in places]
