"""One job on reserved nodes and spot instances over three trace segments (RLBoost 6.2 to 6.4), rule against rule."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from slackwater.bench.options import BenchOptions
from slackwater.sim.rollout.response_lengths import REASONING
from slackwater.sim.rollout.rules import SPOT_RULES
from slackwater.sim.rollout.spot_run import SETUPS, SpotSetup, run_spot
from slackwater.sim.rollout.spot_trace import DRAWN_SEGMENTS, SpotEvent, read_spot_trace

SEGMENTS = ("A", "B", "C")
NO_SPOT = "none"
RETURNING = "returning"
COMPARED = ("rlboost", "ours")
ABLATIONS = ("seeding_off", "memory_off")
SECONDS = 7200.0
QUICK_SECONDS = 2400.0


@dataclass(frozen=True, slots=True)
class _Case:
    model: str
    segment: str
    rule: str
    trace: tuple[SpotEvent, ...]
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    tokens_per_s: float
    tokens_per_dollar: float
    mean_remote: float


def _run(case: _Case) -> _Outcome:
    shape, nodes = SETUPS[case.model]
    setup = SpotSetup(shape, nodes, REASONING)
    rules = SPOT_RULES[case.rule]
    result = run_spot(setup, rules, case.trace, seconds=case.seconds, seed=case.seed)
    return _Outcome(result.tokens_per_s, result.tokens_per_dollar, result.mean_remote)


def returning_instances() -> tuple[SpotEvent, ...]:
    """RLBoost Figure 12: five of six instances are taken at once, and come back one by one."""
    events = [SpotEvent(0.0, "add", f"first{number}") for number in range(6)]
    events += [SpotEvent(2700.0, "remove", f"first{number}") for number in range(1, 6)]
    events += [SpotEvent(3300.0 + 600 * n, "add", f"second{n}") for n in range(5)]
    return tuple(events)


def _trace(options: BenchOptions, segment: str) -> tuple[SpotEvent, ...]:
    if options.data is None:
        return DRAWN_SEGMENTS[segment].draw(options.seed + SEGMENTS.index(segment))
    return read_spot_trace(options.data_file(f"spot/rlboost_like_segment_{segment}_dev.csv.gz"))


def _cases(options: BenchOptions) -> list[_Case]:
    seconds = QUICK_SECONDS if options.quick else SECONDS
    models = ("14b",) if options.quick else tuple(SETUPS)
    segments = ("B",) if options.quick else SEGMENTS
    cases = [
        _Case(model, segment, rule, _trace(options, segment), seconds, options.seed)
        for model in models
        for segment in segments
        for rule in (*COMPARED, *(ABLATIONS if model == "14b" else ()))
    ]
    cases += [_Case(model, NO_SPOT, "colocated", (), seconds, options.seed) for model in models]
    trace, ablated = returning_instances(), (*COMPARED, *ABLATIONS)
    cases += [_Case("14b", RETURNING, rule, trace, SECONDS, options.seed) for rule in ablated]
    return cases


def run(options: BenchOptions) -> dict[str, float]:
    """Throughput and cost efficiency of every rule; all rules see the same traces and responses."""
    cases = _cases(options)
    outcomes: dict[tuple[str, str, str], _Outcome] = {}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for case, outcome in zip(cases, pool.map(_run, cases), strict=True):
            outcomes[case.model, case.segment, case.rule] = outcome
            options.progress(f"{case.model} {case.segment} {case.rule}", len(outcomes) / len(cases))
    return _figures(outcomes)


def _figures(outcomes: dict[tuple[str, str, str], _Outcome]) -> dict[str, float]:
    places = sorted({(m, s) for m, s, _ in outcomes if s not in (RETURNING, NO_SPOT)})
    figures: dict[str, float] = {}
    ours = [_ratio(outcomes, [place], "ours", "rlboost") for place in places]
    costs = [_ratio(outcomes, [place], "ours", "rlboost", cost=True) for place in places]
    figures["ours_over_rlboost_mean"] = float(np.mean(ours))
    figures["ours_over_rlboost_min"] = min(ours)
    figures["ours_over_rlboost_cost_mean"] = float(np.mean(costs))
    figures["ours_over_rlboost_cost_min"] = min(costs)
    for model in sorted({model for model, _ in places}):
        mine = [place for place in places if place[0] == model]
        for rule in COMPARED:
            name = f"{rule}_over_colocated_{model}"
            figures[name] = _ratio(outcomes, mine, rule, "colocated")
            figures[f"{name}_cost"] = _ratio(outcomes, mine, rule, "colocated", cost=True)
    for rule in ABLATIONS:
        mine = [place for place in places if place[0] == "14b"]
        figures[f"{rule}_over_rlboost_14b"] = _ratio(outcomes, mine, rule, "rlboost")
    returning = [("14b", RETURNING)]
    for rule in (*ABLATIONS, "ours"):
        figures[f"returning_{rule}_over_rlboost"] = _ratio(outcomes, returning, rule, "rlboost")
    for (model, segment, rule), outcome in sorted(outcomes.items()):
        figures[f"{model}_{segment}_{rule}_tokens_per_s"] = outcome.tokens_per_s
        figures[f"{model}_{segment}_{rule}_tokens_per_dollar"] = outcome.tokens_per_dollar
        figures[f"{model}_{segment}_{rule}_mean_spot_instances"] = outcome.mean_remote
    return figures


def _ratio(
    outcomes: dict[tuple[str, str, str], _Outcome],
    places: Sequence[tuple[str, str]],
    rule: str,
    over: str,
    *,
    cost: bool = False,
) -> float:
    """Mean over the places of rule's figure over the other's."""

    def figure(place: tuple[str, str], name: str) -> float:
        outcome = outcomes[place[0], NO_SPOT if name == "colocated" else place[1], name]
        return outcome.tokens_per_dollar if cost else outcome.tokens_per_s

    return float(np.mean([figure(place, rule) / figure(place, over) for place in places]))
