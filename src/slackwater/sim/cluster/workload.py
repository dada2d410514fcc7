"""Synthetic jobs, calibrated to what the papers publish about their inputs, never to their
results.
"""

from dataclasses import dataclass
from typing import Any, Literal

from slackwater.model.errors import ConfigError, check_above_zero
from slackwater.model.job import SloScope

Mix = Literal["balanced", "rollout_heavy", "train_heavy", "mixed"]


def _check(workload: Any, *positive: str) -> None:
    check_above_zero("workload: ", workload, "jobs", *positive)
    if not 1 <= workload.slo_low <= workload.slo_high:
        fix = "must be at least 1 and at most slo_high"
        raise ConfigError.of("workload: slo_low", workload.slo_low, fix)


@dataclass(frozen=True, slots=True)
class ProductionWorkload:
    """One tenant's jobs (WEAVE 6.4): 200 in two weeks, 3B-32B, token limits of 4k-32k (mean
    12.1k), mean 27.9 h.

    Single-turn jobs have balanced phases, multi-turn ones rollouts 3-4 times as long as their
    training (Figure 2).
    """

    kind: Literal["production"] = "production"
    jobs: int = 200
    span_s: float = 14 * 86400.0
    mean_duration_s: float = 27.9 * 3600.0
    multi_turn_share: float = 0.5
    slo_low: float = 1.0
    slo_high: float = 2.0
    slo_scope: SloScope = "job"

    def __post_init__(self) -> None:
        _check(self, "span_s", "mean_duration_s")
        if not 0 <= self.multi_turn_share <= 1:
            raise ConfigError.of(
                "workload: multi_turn_share", self.multi_turn_share, "must lie between 0 and 1"
            )


@dataclass(frozen=True, slots=True)
class ProfileWorkload:
    """Jobs with the phase lengths of WEAVE's Table 6. Arrivals and durations come from `arrivals`
    (pairs of arrival and duration, in seconds), or are drawn: 300 jobs in 580 h, mean 14.4 h, at
    most 142.9 h.
    """

    kind: Literal["profiles"] = "profiles"
    mix: Mix = "mixed"
    jobs: int = 300
    span_s: float = 580 * 3600.0
    mean_duration_s: float = 14.4 * 3600.0
    max_duration_s: float = 142.9 * 3600.0
    slo_low: float = 1.0
    slo_high: float = 2.0
    arrivals: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        _check(self, "span_s", "mean_duration_s", "max_duration_s")
        for number, (arrival_s, duration_s) in enumerate(self.arrivals):
            if arrival_s < 0 or duration_s <= 0:
                raise ConfigError.of(
                    f"workload: arrivals[{number}]",
                    [arrival_s, duration_s],
                    "must be an arrival of 0 or later and a duration above 0",
                )


@dataclass(frozen=True, slots=True)
class CycleWorkload:
    """Jobs with the cycles of PlexRL's table (7B, 30B, 235B), for time to drain on a fixed fleet:
    a day of arrivals.
    """

    kind: Literal["cycles"] = "cycles"
    jobs: int = 120
    span_s: float = 24 * 3600.0
    mean_iterations: float = 100.0
    slo_low: float = 1.5
    slo_high: float = 1.5

    def __post_init__(self) -> None:
        _check(self, "span_s", "mean_iterations")
