"""A simulated job: its client's open requests, and its phase lengths."""

from dataclasses import dataclass, field

import numpy as np

from slackwater.model.ids import JobId, ModelId, RequestId, TurnId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.operation import Operation

BASE_MODEL = "base"


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """The responses of an iteration: their number, and lengths up to `max_tokens`."""

    turns: int = 12
    max_tokens: int = 24
    median_share: float = 0.3
    sigma: float = 0.7

    def lengths(self, seed: int, iteration: int) -> list[int]:
        """The responses' hidden lengths, which depend on seed and iteration only."""
        rng = np.random.default_rng((seed, iteration))
        drawn = rng.lognormal(np.log(self.median_share), self.sigma, self.turns)
        whole: list[int] = np.clip(drawn * self.max_tokens, 1, self.max_tokens).astype(int).tolist()
        return whole


@dataclass(slots=True)
class SimulatedJob:
    """`life` counts its drivers, to ignore callbacks of earlier ones.

    `lengths` are its real phase lengths, whatever its owner declared; without `profiled` the owner
    declared none. With `samples_only` it samples from the base model's weights; with `supervised`
    it samples nothing, and trains this many steps between two versions.
    """

    spec: JobSpec
    number: int
    lengths: JobProfile
    profiled: bool = True
    samples_only: bool = False
    supervised: int = 0
    life: int = 0
    iteration: int = 0
    seq: int = 0
    asked_turns: int = 0
    open_turns: set[TurnId] = field(default_factory=set)
    open_ops: dict[RequestId, Operation] = field(default_factory=dict)
    rollout_nodes: int = 1
    train_nodes: int = 1
    alive: bool = False
    over: bool = False

    @property
    def job(self) -> JobId:
        return self.spec.job

    @property
    def model(self) -> ModelId:
        """A restarted driver trains a new model from the last version."""
        return ModelId(f"{self.job}.{self.life}")

    @property
    def version(self) -> str:
        """The weights for the present iteration's turns."""
        return "base" if self.samples_only else f"{self.job}@{self.iteration}"
