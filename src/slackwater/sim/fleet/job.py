"""One simulated job: what its client has open, and what its phases take."""

from dataclasses import dataclass, field

import numpy as np

from slackwater.model.ids import JobId, ModelId, RequestId, TurnId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.operation import Operation


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """Of one iteration: so many responses of at most so many tokens, most of them much shorter."""

    turns: int = 12
    max_tokens: int = 24
    median_share: float = 0.3
    sigma: float = 0.7

    def lengths(self, seed: int, iteration: int) -> list[int]:
        """The responses' hidden lengths: the same whatever happens to the job."""
        rng = np.random.default_rng((seed, iteration))
        drawn = rng.lognormal(np.log(self.median_share), self.sigma, self.turns)
        whole: list[int] = np.clip(drawn * self.max_tokens, 1, self.max_tokens).astype(int).tolist()
        return whole


@dataclass(slots=True)
class SimulatedJob:
    """`life` counts its drivers: what an earlier one left behind is known as such.

    `lengths` are what its phases take, whatever its owner said; without `profiled` its owner said
    nothing. One that `samples_only` samples from the base model's own weights; one that is
    `supervised` samples nothing, and trains so many steps between two versions.
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
        """A driver that is started again trains a model of its own, from the last version."""
        return ModelId(f"{self.job}.{self.life}")

    @property
    def version(self) -> str:
        """The weights that the present iteration's turns are sampled from."""
        return "base" if self.samples_only else f"{self.job}@{self.iteration}"
