"""What each kind of slack brings: completion and cost of one fleet with every kind on and off.

A kind's contribution is its Shapley value: the mean of what switching it on saves, over all orders
in which the five can be switched on. Simulated only; `attainment` is that of the served model.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from math import factorial

import numpy as np

from benchmarks.options import BenchOptions
from benchmarks.slacks.fleet import FiveSlacks, FiveSlacksResult, FiveSlacksRun, Slack

Kinds = frozenset[Slack]
SMALL = FiveSlacks(
    steps=2,
    trajectories=12,
    most_turns=4,
    turns_per_engine=2,
    train_s=20.0,
    arrivals_per_s=0.5,
    cores=6,
)


def every_combination(kinds: Collection[Slack] = tuple(Slack)) -> list[Kinds]:
    """Every choice of kinds, from none to all."""
    return [
        frozenset(chosen)
        for count in range(len(kinds) + 1)
        for chosen in combinations(sorted(kinds), count)
    ]


def shapley_values(values: Mapping[Kinds, float]) -> dict[Slack, float]:
    """What each kind adds to the value, by Shapley; their sum is that of all less that of none."""
    kinds = max(values, key=len)
    found = dict.fromkeys(sorted(kinds), 0.0)
    for kind in found:
        for others in values:
            if kind not in others:
                size, rest = len(others), len(kinds) - len(others) - 1
                weight = factorial(size) * factorial(rest) / factorial(len(kinds))
                found[kind] += weight * (values[others | {kind}] - values[others])
    return found


def run(options: BenchOptions) -> dict[str, float]:
    """Figures of no slack and of all, and each kind's contribution with its spread over seeds."""
    seeds = range(options.seed, options.seed + (1 if options.quick else 3))
    plan = SMALL if options.quick else FiveSlacks()
    cases = [(plan, on, seed) for seed in seeds for on in every_combination()]
    results: dict[tuple[int, Kinds], FiveSlacksResult] = {}
    with ProcessPoolExecutor(options.processes or os.cpu_count()) as pool:
        for case, result in zip(cases, pool.map(_result, cases), strict=True):
            results[case[2], case[1]] = result
            options.progress(f"seed {case[2]}", len(results) / len(cases))
    return _figures(seeds, results)


def _result(case: tuple[FiveSlacks, Kinds, int]) -> FiveSlacksResult:
    plan, on, seed = case
    return FiveSlacksRun(plan, on, seed).run()


def _figures(
    seeds: Sequence[int], results: Mapping[tuple[int, Kinds], FiveSlacksResult]
) -> dict[str, float]:
    none, whole = frozenset[Slack](), frozenset(Slack)
    first = [results[seed, none] for seed in seeds]
    last = [results[seed, whole] for seed in seeds]
    figures = {
        "seeds": float(len(seeds)),
        "kinds_seen": float(min(one.kinds_seen for one in last)),
        "none_completed_s": _mean(one.completed_s for one in first),
        "all_completed_s": _mean(one.completed_s for one in last),
        "none_cost": _mean(one.cost for one in first),
        "all_cost": _mean(one.cost for one in last),
        "none_attainment": _mean(one.attainment for one in first),
        "all_attainment": _mean(one.attainment for one in last),
    }
    measures: dict[str, Callable[[FiveSlacksResult], float]] = {
        "saved_s": lambda one: -one.completed_s,
        "saved_cost": lambda one: -one.cost,
        "attainment": lambda one: one.attainment,
    }
    for name, measure in measures.items():
        by_seed = [
            shapley_values({on: measure(results[seed, on]) for on in every_combination()})
            for seed in seeds
        ]
        for kind in Slack:
            found = [values[kind] for values in by_seed]
            figures[f"{kind}_{name}"] = _mean(found)
            figures[f"{kind}_{name}_least"] = min(found)
            figures[f"{kind}_{name}_most"] = max(found)
    return figures


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
