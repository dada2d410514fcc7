"""Rollouts on serving devices, simulated with public traces: mode against mode, peers beside,
ROSE's tables.

Of each trace one window is taken: the one with the median number of requests (`*_window_from_s`
says where it begins). Its load is the largest at which the service alone keeps its promise with
room to spare, and half of it for the comparison of all modes: inputs are calibrated so, outcomes
are what comes out.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np

from benchmarks.options import BenchOptions
from benchmarks.serving.arrivals import median_window
from benchmarks.serving.lending_case import (
    AUTOSCALE,
    SPLIT,
    WHOLE,
    LendingCase,
    LendingOutcome,
    most_density,
    outcome_of,
)
from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.modes import MODES
from slackwater.sim.serving.serving_trace import read_serving_trace

TRACES = {
    "conv": "serving/azure2023_conv_dev.csv.gz",
    "code": "serving/azure2023_code_dev.csv.gz",
    "mooncake": "serving/mooncake_conversation_dev.csv.gz",
    "servegen": "serving/servegen_mlarge_2h_dev.csv.gz",
}
_SLO_8B, _SLO_32B = ServingSlo(0.5, 0.15), ServingSlo(1.0, 0.45)
# Prompts of ten thousand tokens take a second each on one device: nobody could promise 500 ms for
# them.
_SLOS = {"mooncake": ServingSlo(5.0, 0.15)}
_FEW = ("dual", "ours")
_ALL = (*(name for name in MODES if name not in ("none", "foresight")), "ours", AUTOSCALE)
_READ_S = 3600.0


def run(options: BenchOptions) -> dict[str, float]:
    """Figures by trace and mode; `added` are requests that met the promise without lending and do
    not with it.
    """
    names = ("conv", "code") if options.quick else tuple(TRACES)
    places, figures = _places(options, names)
    modes = _FEW if options.quick else _ALL
    with ProcessPoolExecutor(2) as pool:
        options.progress("loads that the services bear alone", 0.05)
        edges = dict(zip(places, pool.map(most_density, places.values()), strict=True))
        cases = _cases(places, edges, modes)
        if not options.quick:
            cases += _tables(places["conv"], edges["conv"])
        outcomes: list[LendingOutcome] = []
        for number, outcome in enumerate(pool.map(outcome_of, cases)):
            outcomes.append(outcome)
            done = 0.1 + 0.9 * number / len(cases)
            options.progress(f"{cases[number].group} {cases[number].mode}", done)
    figures |= {f"{name}_alone_density": edge for name, edge in edges.items()}
    return figures | _by_case(cases, outcomes) | _by_mode(cases, outcomes)


def _places(
    options: BenchOptions, names: Sequence[str]
) -> tuple[dict[str, LendingCase], dict[str, float]]:
    """A service for each trace, and clusters of other roles and another shape."""
    seconds = 40.0 if options.quick else 60.0
    places: dict[str, LendingCase] = {}
    figures: dict[str, float] = {"window_s": seconds}
    for number, name in enumerate(names):
        options.progress(f"reading {name}", 0.05 * number / len(names))
        path = options.data_file(TRACES[name])
        trace = read_serving_trace(path, seconds=_READ_S, seed=options.seed)
        figures[f"{name}_window_from_s"], arrivals = median_window(trace, seconds)
        slo = _SLOS.get(name, _SLO_8B)
        games = 96 if options.quick else 128
        places[name] = LendingCase(name, arrivals, seconds, slo, games, seed=options.seed)
    if not options.quick:
        conv, servegen = places["conv"], places["servegen"]
        places["conv_split"] = replace(conv, group="conv_split", roles=SPLIT)
        places["servegen_whole"] = replace(servegen, group="servegen_whole", roles=WHOLE)
        places["conv_32b"] = replace(conv, group="conv_32b", slo=_SLO_32B, large=True, games=256)
    return places, figures


def _cases(
    places: Mapping[str, LendingCase], edges: Mapping[str, float], modes: Sequence[str]
) -> list[LendingCase]:
    """Every mode at half of what the service bears alone, the best of them at all of it."""
    found: list[LendingCase] = []
    for name, place in places.items():
        # Whole nodes that change sides would leave a cluster without a prefill or a decode node.
        alike = len(set(place.roles)) == 1
        fit = [mode for mode in modes if alike or mode != AUTOSCALE]
        half = replace(place, density=edges[name] / 2)
        full = replace(place, group=f"{name}_full", density=edges[name])
        found += [replace(half, mode=mode) for mode in ("none", *fit)]
        found += [replace(full, mode=mode) for mode in ("none", *_FEW)]
    return found


def _tables(place: LendingCase, edge: float) -> list[LendingCase]:
    """ROSE's tables 4 and 5: leases, and serving density."""
    leases = [
        replace(place, group=f"lease_{lease_s:g}", mode=mode, lease_s=lease_s, density=edge / 2)
        for lease_s in (10.0, 20.0, 50.0, 100.0)
        for mode in ("none", "ours")
    ]
    return leases + [
        replace(place, group=f"times_{times:g}", mode=mode, density=edge / 3 * times)
        for times in (1.0, 1.5, 2.0)
        for mode in ("none", "ours")
    ]


def _by_case(cases: Sequence[LendingCase], outcomes: Sequence[LendingOutcome]) -> dict[str, float]:
    alone = _of_mode("none", cases, outcomes)
    figures: dict[str, float] = {}
    for case, outcome in zip(cases, outcomes, strict=True):
        kept, key = alone[case.group], f"{case.group}_{case.mode}"
        figures |= {
            f"{key}_ttft_p99_ms": outcome.ttft_p99_ms,
            f"{key}_tpot_p99_ms": outcome.tpot_p99_ms,
            f"{key}_rollout_s": outcome.rollout_s,
            f"{key}_requests": float(len(outcome.met)),
            f"{key}_misses": float((~outcome.met).sum()),
            f"{key}_added": float(_added(kept, outcome)),
            f"{key}_speedup": kept.rollout_s / outcome.rollout_s,
            f"{key}_serving_share": outcome.serving_share,
            f"{key}_rollout_share": outcome.rollout_share,
            f"{key}_cuts": float(outcome.cuts),
        }
    return figures


def _by_mode(cases: Sequence[LendingCase], outcomes: Sequence[LendingOutcome]) -> dict[str, float]:
    """Over all cases of a mode: misses that it added, and rollout times against no lending and
    against ours.
    """
    alone, ours = (_of_mode(mode, cases, outcomes) for mode in ("none", "ours"))
    figures: dict[str, float] = {}
    for mode in dict.fromkeys(case.mode for case in cases):
        found = _of_mode(mode, cases, outcomes)
        figures[f"{mode}_added_misses"] = float(
            sum(_added(alone[group], one) for group, one in found.items())
        )
        nets = [
            _added(alone[group], one) - _added(one, alone[group]) for group, one in found.items()
        ]
        figures[f"{mode}_net_misses"] = float(sum(nets))
        for name, other in (("faster_than_none", alone), ("slower_than_ours", ours)):
            wins = name == "faster_than_none"
            ratios = [
                (other[group].rollout_s / one.rollout_s) ** (1 if wins else -1)
                for group, one in found.items()
            ]
            figures[f"{mode}_{name}"] = float(np.exp(np.mean(np.log(ratios))))
    return figures


def _added(kept: LendingOutcome, outcome: LendingOutcome) -> int:
    """Requests that met the promise in one run and not in the other, of those that came in both."""
    both = min(len(kept.met), len(outcome.met))
    return int((kept.met[:both] & ~outcome.met[:both]).sum())


def _of_mode(
    mode: str, cases: Sequence[LendingCase], outcomes: Sequence[LendingOutcome]
) -> dict[str, LendingOutcome]:
    return {
        case.group: outcome
        for case, outcome in zip(cases, outcomes, strict=True)
        if case.mode == mode
    }
