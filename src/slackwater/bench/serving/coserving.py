"""Rollouts on serving devices, simulated with public traces: mode against mode, peers beside, ROSE's tables.

For each trace the load is the largest at which the service alone keeps its promise with room to spare (and half of
it for the modes' comparison): inputs are calibrated so, outcomes are what comes out.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slackwater.bench.options import BenchOptions
from slackwater.model.serving import ServingRole, ServingSlo
from slackwater.policy.serving.modes import MODES, LendingMode
from slackwater.policy.serving.prefix_lease import PrefixLease
from slackwater.sim.rollout.agent_run import AgentFleet
from slackwater.sim.rollout.engine_cost import H800, QWEN3_8B, QWEN3_32B, EngineCost, ModelShape
from slackwater.sim.serving.autoscaling import AutoscaledCluster
from slackwater.sim.serving.cluster import ClusterPlan, ServingCluster
from slackwater.sim.serving.device_cost import SharedDevice
from slackwater.sim.serving.game_sessions import drawn_games
from slackwater.sim.serving.run import CoservingRun, RolloutStages
from slackwater.sim.serving.serving_trace import read_serving_trace, scaled

TRACES = {
    "conv": "serving/azure2023_conv_dev.csv.gz",
    "code": "serving/azure2023_code_dev.csv.gz",
    "mooncake": "serving/mooncake_conversation_dev.csv.gz",
    "servegen": "serving/servegen_mlarge_2h_dev.csv.gz",
}
_MIXED = (ServingRole.MIXED,) * 4
_SPLIT = (ServingRole.PREFILL, *((ServingRole.DECODE,) * 3))  # ROSE 6: one to three
_DENSITIES = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
_AUTOSCALE = "autoscale"
_SLO_8B, _SLO_32B = ServingSlo(0.5, 0.15), ServingSlo(1.0, 0.45)


@dataclass(frozen=True, slots=True)
class _Case:
    """One run. `density` multiplies the trace; `lease_s` replaces the mode's own."""

    group: str
    trace: Path
    mode: str
    density: float
    seconds: float
    games: int
    stages: int
    split: bool = False
    large: bool = False
    lease_s: float | None = None
    seed: int = 0

    @property
    def slo(self) -> ServingSlo:
        return _SLO_32B if self.large else _SLO_8B


@dataclass(frozen=True, slots=True)
class _Outcome:
    met: NDArray[np.bool_]
    ttft_p99_ms: float
    tpot_p99_ms: float
    rollout_s: float
    serving_share: float
    rollout_share: float
    cuts: int


def run(options: BenchOptions) -> dict[str, float]:
    """Figures by trace and mode; `added` are requests that met the promise without lending and do not with it."""
    files = {name: options.data_file(path) for name, path in TRACES.items()}
    seconds = 60.0 if options.quick else 120.0
    base = _Case("", files["conv"], "none", 1.0, seconds, 96, 1, seed=options.seed)
    if not options.quick:
        base = replace(base, games=128, stages=2)
    names = ("conv", "code") if options.quick else tuple(files)
    modes = ("dual", "ours") if options.quick else (*(m for m in MODES if m != "none"), _AUTOSCALE)
    with ProcessPoolExecutor(2) as pool:
        options.progress("loads", 0.0)
        places = {name: replace(base, group=name, trace=files[name]) for name in names}
        if not options.quick:
            places["conv_split"] = replace(base, group="conv_split", split=True)
            places["conv_32b"] = replace(base, group="conv_32b", large=True, games=256)
        edges = dict(zip(places, pool.map(_edge, places.values()), strict=True))
        cases = [
            replace(place, mode=mode, density=edges[name] / 2)
            for name, place in places.items()
            for mode in ("none", *modes)
            if not (place.split and mode == _AUTOSCALE)
        ]
        cases += [
            replace(place, group=f"{name}_dense", mode=mode, density=edges[name])
            for name, place in places.items()
            for mode in ("none", "dual", "ours")
        ]
        if not options.quick:
            cases += _tables(places["conv"], edges["conv"])
        outcomes: list[_Outcome] = []
        for number, outcome in enumerate(pool.map(_outcome, cases)):
            outcomes.append(outcome)
            options.progress(f"{cases[number].group} {cases[number].mode}", number / len(cases))
    figures = {f"{name}_alone_density": edge for name, edge in edges.items()}
    return figures | _figures(cases, outcomes)


def _tables(place: _Case, edge: float) -> list[_Case]:
    """ROSE's tables 4 and 5: leases, and serving density."""
    cases = [
        replace(place, group=f"lease_{lease_s:g}", mode=mode, lease_s=lease_s, density=edge / 2)
        for lease_s in (10.0, 20.0, 50.0, 100.0)
        for mode in ("none", "ours")
    ]
    return cases + [
        replace(place, group=f"times_{times:g}", mode=mode, density=edge / 3 * times)
        for times in (1.0, 1.5, 2.0)
        for mode in ("none", "ours")
    ]


def _edge(case: _Case) -> float:
    """The largest density at which the service alone keeps its promise, with a tenth of the misses allowed."""
    found = _DENSITIES[0]
    for density in _DENSITIES:
        outcome = _outcome(replace(case, density=density, games=0))
        if outcome.met.mean() < 1.0 - (1.0 - case.slo.share) / 10:
            break
        found = density
    return found


def _mode(case: _Case) -> LendingMode:
    mode = MODES["prefix" if case.mode == _AUTOSCALE else case.mode]
    return mode if case.lease_s is None else replace(mode, lease=PrefixLease(case.lease_s))


def _outcome(case: _Case) -> _Outcome:
    model: ModelShape = QWEN3_32B if case.large else QWEN3_8B
    engine = EngineCost(model, H800, 4 if case.large else 1)
    plan = ClusterPlan(
        SharedDevice(engine, engine),
        case.slo,
        _SPLIT if case.split else _MIXED,
        _mode(case),
        most_nodes=4,
        turns_per_node=16 * engine.devices,
        seed=case.seed,
    )
    trace = read_serving_trace(case.trace, seconds=case.seconds, seed=case.seed)
    arrivals = scaled(trace, case.density, case.seconds, case.seed)
    stages = RolloutStages(drawn_games(case.games, case.seed), case.stages if case.games else 0)
    cluster = AutoscaledCluster if case.mode == _AUTOSCALE else ServingCluster
    done = CoservingRun(plan, AgentFleet(engine, 2), stages, arrivals, cluster=cluster)
    result = done.run(case.seconds)
    return _Outcome(
        result.met(case.slo),
        result.percentile_ms("ttft", 0.99),
        result.percentile_ms("tpot", 0.99),
        result.rollout_s,
        result.serving_share,
        result.rollout_share,
        result.cuts,
    )


def _figures(cases: Sequence[_Case], outcomes: Sequence[_Outcome]) -> dict[str, float]:
    alone = {
        case.group: outcome
        for case, outcome in zip(cases, outcomes, strict=True)
        if case.mode == "none"
    }
    figures: dict[str, float] = {}
    added: dict[str, int] = {}
    net: dict[str, int] = {}
    for case, outcome in zip(cases, outcomes, strict=True):
        kept = alone[case.group]
        key = f"{case.group}_{case.mode}"
        figures |= {
            f"{key}_ttft_p99_ms": outcome.ttft_p99_ms,
            f"{key}_tpot_p99_ms": outcome.tpot_p99_ms,
            f"{key}_rollout_s": outcome.rollout_s,
            f"{key}_requests": float(len(outcome.met)),
            f"{key}_misses": float((~outcome.met).sum()),
            f"{key}_added": float((kept.met & ~outcome.met).sum()),
            f"{key}_speedup": kept.rollout_s / outcome.rollout_s,
            f"{key}_serving_share": outcome.serving_share,
            f"{key}_rollout_share": outcome.rollout_share,
            f"{key}_cuts": float(outcome.cuts),
        }
        added[case.mode] = added.get(case.mode, 0) + int(figures[f"{key}_added"])
        more = int((~outcome.met).sum()) - int((~kept.met).sum())
        net[case.mode] = net.get(case.mode, 0) + more
    for mode in added:
        figures[f"{mode}_added_misses"] = float(added[mode])
        figures[f"{mode}_net_misses"] = float(net[mode])
    ours = {case.group: o for case, o in zip(cases, outcomes, strict=True) if case.mode == "ours"}
    for mode in sorted({case.mode for case in cases} - {"ours"}):
        ratios = [
            outcome.rollout_s / ours[case.group].rollout_s
            for case, outcome in zip(cases, outcomes, strict=True)
            if case.mode == mode and case.group in ours
        ]
        figures[f"ours_faster_than_{mode}"] = float(np.exp(np.mean(np.log(ratios))))
    return figures
