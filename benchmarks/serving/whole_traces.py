"""Lending over whole traces, every request judged to its end: ours against dual and no lending.

Each place is a service with a trace of half an hour. Its load is the largest at which the service
alone keeps its promise over the whole trace with room to spare, 0.8 and 0.5 of it. RL steps follow
each other from the second minute on, so that rollouts borrow for as long as they last. With
`--duration` so many seconds of each trace are simulated, at 0.8 of that load.
"""

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from benchmarks.options import BenchOptions
from benchmarks.serving.lending_case import (
    LendingCase,
    LendingOutcome,
    most_density,
    outcome_of,
)
from slackwater.model.serving import ServingSlo
from slackwater.sim.serving.serving_trace import Arrival, read_serving_trace

LOADS = (1.0, 0.8, 0.5)
_MODES = ("none", "dual", "ours")
_SECONDS, _QUICK_SECONDS = 1700.0, 240.0
_STAGES = 5
_BEGINS_S = 60.0


@dataclass(frozen=True, slots=True)
class _Place:
    """A service: its trace, its promise, and the size of its models."""

    trace: str
    slo: ServingSlo
    large: bool = False


# Prompts of twenty thousand tokens take a second each on one device: nobody could promise 500 ms
# for them.
_PLACES = {
    "conv": _Place("serving/azure2023_conv_dev.csv.gz", ServingSlo(0.5, 0.15)),
    "code": _Place("serving/azure2023_code_dev.csv.gz", ServingSlo(0.5, 0.15)),
    "mooncake": _Place("serving/mooncake_conversation_dev.csv.gz", ServingSlo(5.0, 0.15)),
    "servegen": _Place("serving/servegen_mlarge_2h_dev.csv.gz", ServingSlo(0.5, 0.15)),
    "reasoning": _Place("serving/servegen_r1_2h_dev.csv.gz", ServingSlo(5.0, 0.15)),
    "conv_32b": _Place("serving/azure2023_conv_dev.csv.gz", ServingSlo(1.0, 0.45), large=True),
}
PARTS = tuple(_PLACES)


def run(options: BenchOptions) -> dict[str, float]:
    """Figures by place and load over the seeds, and the bars over all of them."""
    names = [name for name in _PLACES if options.wants(name)]
    seconds = options.duration_s or (_QUICK_SECONDS if options.quick else _SECONDS)
    seeds = range(options.seed, options.seed + (1 if options.quick else 3))
    loads = (0.8,) if options.quick or options.duration_s else LOADS
    if options.quick and options.part is None:
        names = names[:1]
    with ProcessPoolExecutor(options.processes or os.cpu_count()) as pool:
        places = {name: _case(options, name, seconds) for name in names}
        options.progress("the loads that the services bear alone", 0.02)
        edges = dict(zip(names, pool.map(most_density, places.values()), strict=True))
        cases = [
            replace(
                places[name],
                group=f"{name}_{load:g}",
                mode=mode,
                density=load * edges[name],
                seed=seed,
            )
            for name, load, seed, mode in product(names, loads, seeds, _MODES)
        ]
        outcomes = _outcomes(pool, cases, options)
    figures = {f"{name}_alone_density": edge for name, edge in edges.items()}
    figures |= {"seconds": seconds, "seeds": float(len(seeds))}
    for name, load in product(names, loads):
        figures |= _of_group(f"{name}_{load:g}", cases, outcomes)
    return figures | _overall(figures, [f"{n}_{load:g}" for n, load in product(names, loads)])


def _case(options: BenchOptions, name: str, seconds: float) -> LendingCase:
    place = _PLACES[name]
    path = options.data_file(place.trace)
    arrivals = _repeated(read_serving_trace(path, seconds=seconds, seed=options.seed), seconds)
    return LendingCase(
        name,
        arrivals,
        seconds,
        place.slo,
        games=256 if place.large else 128,
        large=place.large,
        stages=max(round(_STAGES * seconds / _SECONDS), 1),
        begins_s=_BEGINS_S,
        seed=options.seed,
    )


def _repeated(arrivals: Sequence[Arrival], seconds: float) -> list[Arrival]:
    """A trace that is shorter begins again."""
    length_s = arrivals[-1].at_s
    rounds = range(math.ceil(seconds / length_s - 0.01))
    again = (replace(one, at_s=one.at_s + n * length_s) for n in rounds for one in arrivals)
    return [one for one in again if one.at_s < seconds]


def _outcomes(
    pool: Executor, cases: Sequence[LendingCase], options: BenchOptions
) -> dict[tuple[str, int, str], LendingOutcome]:
    found: dict[tuple[str, int, str], LendingOutcome] = {}
    for case, outcome in zip(cases, pool.map(outcome_of, cases), strict=True):
        found[case.group, case.seed, case.mode] = outcome
        done = 0.1 + 0.9 * len(found) / len(cases)
        options.progress(f"{case.group} {case.mode} seed {case.seed}", done)
    return found


def _of_group(
    group: str,
    cases: Sequence[LendingCase],
    outcomes: Mapping[tuple[str, int, str], LendingOutcome],
) -> dict[str, float]:
    """One place at one load: sums and worst cases over the seeds."""
    seeds = sorted({case.seed for case in cases if case.group == group})
    alone = [outcomes[group, seed, "none"] for seed in seeds]
    figures = {
        f"{group}_requests": float(sum(len(one.met) for one in alone)),
        f"{group}_misses_alone": float(sum((~one.met).sum() for one in alone)),
        f"{group}_least_over_none": float(np.mean([one.least_s / one.rollout_s for one in alone])),
    }
    for mode in ("dual", "ours"):
        lent = [outcomes[group, seed, mode] for seed in seeds]
        pairs = list(zip(lent, alone, strict=True))
        ratios = [one.rollout_s / none.rollout_s for one, none in pairs]
        tails = [one.ttft_p999_ms / none.ttft_p999_ms for one, none in pairs]
        figures |= {
            f"{group}_{mode}_net_misses": float(sum(_net_misses(*pair) for pair in pairs)),
            f"{group}_{mode}_over_none": float(np.mean(ratios)),
            f"{group}_{mode}_over_none_most": max(ratios),
            f"{group}_{mode}_ttft_p999_over_none": max(tails),
            f"{group}_{mode}_harvest": float(np.mean([one.harvest for one in lent])),
        }
    ours, dual = ([outcomes[group, seed, mode] for seed in seeds] for mode in ("ours", "dual"))
    over = [one.rollout_s / other.rollout_s for one, other in zip(ours, dual, strict=True)]
    return figures | {
        f"{group}_ours_over_dual": float(np.mean(over)),
        f"{group}_ours_over_dual_most": max(over),
    }


def _net_misses(lent: LendingOutcome, alone: LendingOutcome) -> int:
    """More misses than without lending, of the requests that came in both runs."""
    both = min(len(lent.met), len(alone.met))
    return int(alone.met[:both].sum()) - int(lent.met[:both].sum())


def _overall(figures: Mapping[str, float], groups: Sequence[str]) -> dict[str, float]:
    """The bars: misses that lending adds by load, and rollout times."""
    found: dict[str, float] = {}
    for load in LOADS:
        at = [group for group in groups if group.endswith(f"_{load:g}")]
        if not at:
            continue
        requests = sum(figures[f"{group}_requests"] for group in at)
        for mode in ("dual", "ours"):
            net = sum(max(figures[f"{group}_{mode}_net_misses"], 0.0) for group in at)
            found[f"{mode}_net_misses_{load:g}"] = net
            found[f"{mode}_net_miss_share_{load:g}"] = net / requests
        tails = [figures[f"{group}_ours_ttft_p999_over_none"] for group in at]
        found[f"ours_ttft_p999_over_none_{load:g}"] = max(tails)
    for name in ("least_over_none", "ours_over_none", "ours_over_dual"):
        found[f"{name}_mean"] = float(np.mean([figures[f"{group}_{name}"] for group in groups]))
    for name in ("ours_over_none", "ours_over_dual"):
        found[f"{name}_most"] = max(figures[f"{group}_{name}_most"] for group in groups)
    return found
