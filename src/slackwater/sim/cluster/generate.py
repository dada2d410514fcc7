"""Draws jobs for a workload. Every input is one that a paper publishes, or is marked as ours."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.sim.cluster.lengths import mean_shares
from slackwater.sim.cluster.scenario import LengthConfig, Workload
from slackwater.sim.cluster.workload import CycleWorkload, ProductionWorkload, ProfileWorkload

# WEAVE Table 2: GB on one 8-GPU node for the rollout and for the train actors; 3B is scaled
# from 7B.
_BILLIONS = (3.0, 7.0, 14.0, 32.0, 70.0)
_ROLLOUT_GB = (137.8, 275.7, 445.4, 490.3, 391.2)
_TRAIN_GB = (120.0, 240.0, 456.1, 520.4, 458.7)


def rollout_state_gb(model_billions: float) -> float:
    """Per rollout node; linear between the sizes of the table, constant beyond them."""
    return _interpolate(model_billions, _ROLLOUT_GB)


def train_state_gb(model_billions: float) -> float:
    """Per train node."""
    return _interpolate(model_billions, _TRAIN_GB)


def _interpolate(billions: float, sizes_gb: Sequence[float]) -> float:
    right = bisect_right(_BILLIONS, billions)
    if right == 0:
        return sizes_gb[0]
    if right == len(_BILLIONS):
        return sizes_gb[-1]
    low, high = _BILLIONS[right - 1], _BILLIONS[right]
    share = (billions - low) / (high - low)
    return sizes_gb[right - 1] + share * (sizes_gb[right] - sizes_gb[right - 1])


@dataclass(frozen=True, slots=True)
class _Model:
    """WEAVE Table 3: nodes by size."""

    billions: float
    nodes: int
    share: float  # of the jobs; ours


_MODELS = (
    _Model(3, 1, 0.2),
    _Model(7, 1, 0.4),
    _Model(14, 1, 0.25),
    _Model(32, 2, 0.15),
)
# Token limits of 4k-32k with a mean of 12.1k (WEAVE 6.4); the shares are ours.
_TOKEN_LIMITS = (4000, 8000, 16000, 32000)
_TOKEN_LIMIT_SHARES = (0.275, 0.35, 0.24, 0.135)
# WEAVE Table 4 (a): a single-turn 7B job at 8k tokens takes 258 s an iteration, about half of it
# rolling out.
_ROLLOUT_S_PER_TOKEN_7B = 0.016
# Weights of two bytes a parameter over the 20 Gb/s link between the clusters (WEAVE 6.1), sent
# once.
_SYNC_S_PER_BILLION = 0.8
_PHASE_RANGE_S = (50.0, 900.0)

# WEAVE Table 6: rollout and train ranges for small, medium and large jobs.
_TABLE_6 = {
    "balanced": (((50, 100), (50, 100)), ((100, 200), (100, 200)), ((200, 300), (200, 300))),
    "rollout_heavy": (((100, 200), (25, 50)), ((200, 400), (50, 100)), ((400, 600), (100, 200))),
    "train_heavy": (((25, 50), (100, 200)), ((50, 100), (200, 400)), ((100, 200), (400, 600))),
}


@dataclass(frozen=True, slots=True)
class _Cycle:
    """PlexRL's table: what keeps the train nodes busy in one cycle (log-probs, update, sync).
    Nodes and shares are ours.
    """

    billions: float
    cycle_s: float
    busy_s: float
    nodes: int
    state_gb: float
    share: float


_CYCLES = (
    _Cycle(7, 289.03, 9.66 + 38.08 + 9.76, 1, 240.0, 0.5),
    _Cycle(30, 284.80, 19.62 + 56.35 + 7.57, 2, 520.4, 0.3),
    _Cycle(235, 589.71, 20.11 + 82.39 + 8.89, 4, 458.7, 0.2),
)


def generate_jobs(workload: Workload, seed: int, lengths: LengthConfig) -> tuple[JobSpec, ...]:
    """The same workload and seed give the same jobs. Durations are those of the job alone at its
    real lengths.
    """
    generator = np.random.default_rng([seed, 0])
    match workload:
        case ProductionWorkload():
            return _production(workload, generator, lengths)
        case ProfileWorkload():
            return _profiles(workload, generator)
        case CycleWorkload():
            return _cycles(workload, generator)
    assert_never(workload)


def _production(
    workload: ProductionWorkload, generator: np.random.Generator, lengths: LengthConfig
) -> tuple[JobSpec, ...]:
    rollout_share, train_share = mean_shares(lengths)
    arrivals_s = np.sort(_daytime(generator, workload.jobs, workload.span_s))
    # Long runs are common and a few take very long: log-normal about the published mean; the
    # deviation is ours.
    sigma = 0.9
    durations_s = generator.lognormal(
        np.log(workload.mean_duration_s) - sigma**2 / 2, sigma, workload.jobs
    )
    jobs = []
    for number in range(workload.jobs):
        model = _MODELS[int(generator.choice(len(_MODELS), p=[m.share for m in _MODELS]))]
        tokens = float(generator.choice(_TOKEN_LIMITS, p=_TOKEN_LIMIT_SHARES))
        multi_turn = generator.random() < workload.multi_turn_share
        profile = _production_profile(model, tokens, multi_turn, generator)
        realised_s = (
            profile.rollout_s * rollout_share + profile.train_s * train_share + profile.sync_s
        )
        iterations = max(round(float(durations_s[number]) / realised_s), 5)
        slo = float(generator.uniform(workload.slo_low, workload.slo_high))
        jobs.append(
            JobSpec(
                job=JobId(f"job-{number:03d}"),
                arrival_s=float(arrivals_s[number]),
                iterations=iterations,
                slo=slo,
                profile=profile,
                slo_scope=workload.slo_scope,
            )
        )
    return tuple(jobs)


def _production_profile(
    model: _Model, tokens: float, multi_turn: bool, generator: np.random.Generator
) -> JobProfile:
    """Worst-case lengths: single-turn jobs are balanced, multi-turn rollouts 3-4 times their
    training (Figure 2).
    """
    rollout_s = _ROLLOUT_S_PER_TOKEN_7B * tokens * (model.billions / 7) ** 0.4
    rollout_s *= float(generator.lognormal(0, 0.2))
    if multi_turn:
        rollout_s *= 2.5
        skew = float(generator.uniform(3, 4))
    else:
        skew = float(generator.uniform(0.8, 1.4))
    low, high = _PHASE_RANGE_S
    rollout_s = min(max(rollout_s, low), high)
    return JobProfile(
        rollout_s=rollout_s,
        train_s=min(max(rollout_s / skew, low), high),
        sync_s=_SYNC_S_PER_BILLION * model.billions,
        rollout_nodes=model.nodes,
        train_nodes=model.nodes,
        rollout_state_gb=rollout_state_gb(model.billions),
        train_state_gb=train_state_gb(model.billions),
        model_billions=model.billions,
    )


def _daytime(generator: np.random.Generator, jobs: int, span_s: float) -> np.ndarray:
    """Arrivals that follow working hours: the rate swings by 80 % over a day (ours)."""
    arrivals: list[float] = []
    while len(arrivals) < jobs:
        at_s = float(generator.uniform(0, span_s))
        rate = 1 + 0.8 * np.sin(2 * np.pi * at_s / 86400)
        if generator.uniform(0, 1.8) < rate:
            arrivals.append(at_s)
    return np.array(arrivals)


def _profiles(workload: ProfileWorkload, generator: np.random.Generator) -> tuple[JobSpec, ...]:
    pairs = workload.arrivals or _philly_like(workload, generator)
    kinds = list(_TABLE_6) if workload.mix == "mixed" else [workload.mix]
    jobs = []
    for number, (arrival_s, duration_s) in enumerate(pairs):
        kind = kinds[int(generator.integers(len(kinds)))]
        rollout, train = _TABLE_6[kind][int(generator.integers(3))]
        profile = JobProfile(
            rollout_s=float(generator.uniform(*rollout)), train_s=float(generator.uniform(*train))
        )
        slo = float(generator.uniform(workload.slo_low, workload.slo_high))
        iterations = max(round(duration_s / profile.solo_s), 1)
        jobs.append(JobSpec(JobId(f"job-{number:03d}"), arrival_s, iterations, slo, profile))
    return tuple(jobs)


def _philly_like(
    workload: ProfileWorkload, generator: np.random.Generator
) -> list[tuple[float, float]]:
    """Log-normal durations whose mean is 2.3 times their median, as in the public segment; cut at
    the longest.
    """
    sigma = 1.3
    durations_s = generator.lognormal(
        np.log(workload.mean_duration_s) - sigma**2 / 2, sigma, workload.jobs
    )
    durations_s = np.minimum(durations_s, workload.max_duration_s)
    arrivals_s = np.sort(generator.uniform(0, workload.span_s, workload.jobs))
    return list(zip(arrivals_s.tolist(), durations_s.tolist(), strict=True))


def _cycles(workload: CycleWorkload, generator: np.random.Generator) -> tuple[JobSpec, ...]:
    jobs = []
    arrivals_s = np.sort(generator.uniform(0, workload.span_s, workload.jobs))
    for number in range(workload.jobs):
        kind = _CYCLES[int(generator.choice(len(_CYCLES), p=[c.share for c in _CYCLES]))]
        profile = JobProfile(
            rollout_s=kind.cycle_s - kind.busy_s,
            train_s=kind.busy_s,
            rollout_nodes=kind.nodes,
            train_nodes=kind.nodes,
            rollout_state_gb=kind.state_gb,
            train_state_gb=kind.state_gb,
            model_billions=kind.billions,
        )
        iterations = max(int(generator.exponential(workload.mean_iterations)), 5)
        slo = float(generator.uniform(workload.slo_low, workload.slo_high))
        jobs.append(
            JobSpec(JobId(f"job-{number:03d}"), float(arrivals_s[number]), iterations, slo, profile)
        )
    return tuple(jobs)
