"""Jobs as the co-scheduler sees them: one RL post-training run each."""

import math
from dataclasses import dataclass
from typing import Literal

from slackwater.model.errors import ConfigError, check_above_zero, check_not_negative
from slackwater.model.ids import JobId

# What an SLO bounds: each iteration, or the job's total time.
SloScope = Literal["iteration", "job"]

# With an iteration SLO one iteration in this many may be longer: the one with a move.
ITERATIONS_PER_MOVE = 100


@dataclass(frozen=True, slots=True)
class JobProfile:
    """The worst case of one iteration: every response at the job's token limit (WEAVE 4.2).

    On n nodes training takes `train_s * train_nodes / n`, since the data-parallel degree is matched
    to the group. `rollout_devices` and `train_devices` are the ranks of the job's layouts: it needs
    this many devices, of a part of a node or of several nodes; 0 means whole nodes. State sizes are
    per node, or part of one, in host memory.
    """

    rollout_s: float
    train_s: float
    sync_s: float = 0.0
    rollout_nodes: int = 1
    train_nodes: int = 1
    rollout_state_gb: float = 275.7
    train_state_gb: float = 240.0
    model_billions: float = 7.0
    rollout_devices: int = 0
    train_devices: int = 0

    def __post_init__(self) -> None:
        positive = ("rollout_s", "train_s", "rollout_nodes", "train_nodes", "model_billions")
        check_above_zero("profile: ", self, *positive)
        never_negative = ("sync_s", "rollout_state_gb", "train_state_gb")
        check_not_negative("profile: ", self, *never_negative, "rollout_devices", "train_devices")

    def train_s_on(self, nodes: int) -> float:
        """Train time with the data-parallel degree matched to `nodes`."""
        return self.train_s * self.train_nodes / nodes

    @property
    def solo_s(self) -> float:
        """One iteration alone: rollout, then train, then sync."""
        return self.rollout_s + self.train_s + self.sync_s


@dataclass(frozen=True, slots=True)
class JobTerms:
    """Terms of a submitted job: the number of iterations, and how much slower than alone each of
    them, or all together, may be (`slo_scope`).

    `duty_ratio` is the largest share of its time that the job may wait for others (PlexRL 7.2); it
    bounds the slowdown as the SLO does. Higher priorities are placed first. Nodes, devices
    and sizes are its needs until it has a profile.
    """

    iterations: int
    slo: float = 2.0
    priority: int = 0
    duty_ratio: float | None = None
    rollout_nodes: int = 1
    train_nodes: int = 1
    rollout_state_gb: float = 0.0
    train_state_gb: float = 0.0
    model_billions: float = 0.001
    slo_scope: SloScope = "job"
    rollout_devices: int = 0
    train_devices: int = 0

    def __post_init__(self) -> None:
        positive = ("iterations", "rollout_nodes", "train_nodes", "model_billions")
        check_above_zero("job: ", self, *positive)
        if not 1 <= self.slo < float("inf"):
            fix = "must be at least 1 (1.2 allows 20 % slowdown)"
            raise ConfigError.of("job: slo", self.slo, fix)
        _check_scope("job: slo_scope", self.slo_scope)
        if self.duty_ratio is not None and not 0 <= self.duty_ratio < 1:
            fix = "must be at least 0 and below 1 (0.3 lets it wait 30 % of its time)"
            raise ConfigError.of("job: duty_ratio", self.duty_ratio, fix)

    @property
    def bound(self) -> float:
        """The largest slowdown within both bounds."""
        if self.duty_ratio is None:
            return self.slo
        return min(self.slo, 1 / (1 - self.duty_ratio))

    def profile(self, rollout_s: float, train_s: float, sync_s: float) -> JobProfile:
        return JobProfile(
            rollout_s=rollout_s,
            train_s=train_s,
            sync_s=sync_s,
            rollout_nodes=self.rollout_nodes,
            train_nodes=self.train_nodes,
            rollout_state_gb=self.rollout_state_gb,
            train_state_gb=self.train_state_gb,
            model_billions=self.model_billions,
            rollout_devices=self.rollout_devices,
            train_devices=self.train_devices,
        )


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One run: its arrival, its iterations, and its slowdown SLO."""

    job: JobId
    arrival_s: float
    iterations: int
    slo: float
    profile: JobProfile
    priority: int = 0
    slo_scope: SloScope = "job"

    def __post_init__(self) -> None:
        _check_scope(f"job {self.job}: slo_scope", self.slo_scope)
        check_not_negative(f"job {self.job}: ", self, "arrival_s")
        check_above_zero(f"job {self.job}: ", self, "iterations")
        if self.slo < 1:
            raise ConfigError.of(
                f"job {self.job}: slo", self.slo, "must be at least 1 (1.2 allows 20 % slowdown)"
            )

    @property
    def iteration_bound_s(self) -> float:
        """The longest iteration within the SLO; infinite if the SLO bounds only the whole job."""
        return self.slo * self.profile.solo_s if self.slo_scope == "iteration" else math.inf


def _check_scope(field: str, scope: str) -> None:
    if scope not in ("iteration", "job"):
        raise ConfigError.of(field, scope, 'must be "iteration" or "job"')
