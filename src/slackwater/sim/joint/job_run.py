"""One simulated job of a joint fleet: where it stands, its turns, its engines and its trainer."""

from dataclasses import dataclass, field

import numpy as np

from slackwater.model.ids import InstanceId, JobId, NodeId, TurnId, WorkerId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.placement import Phase


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
class JobRun:
    """`epoch` 0: it has no nodes. `serial` counts its beginnings, so that what an older one left behind is known as such.
    `lengths` are what its phases take, whatever its owner said."""

    spec: JobSpec
    number: int
    lengths: JobProfile
    epoch: int = 0
    iteration: int = 0
    serial: int = 0
    rollout_nodes: tuple[NodeId, ...] = ()
    train_nodes: tuple[NodeId, ...] = ()
    permit: int | None = None
    phase: Phase | None = None
    phase_began_s: float = 0.0
    shrunk: bool = False
    open_turns: set[TurnId] = field(default_factory=set)
    asked_turns: int = 0
    tail_said: bool = False
    engines: dict[InstanceId, NodeId] = field(default_factory=dict)
    trainer: WorkerId | None = None
    training: bool = False
    iterations_done: int = 0
    over: bool = False

    @property
    def job(self) -> JobId:
        return self.spec.job

    @property
    def local(self) -> bool:
        """All phases on the train nodes: its engines are local ones."""
        return self.rollout_nodes == self.train_nodes

    @property
    def version(self) -> str:
        """The weights that the present iteration's turns are sampled from."""
        return self.version_of(self.iteration)

    def version_of(self, iteration: int) -> str:
        return f"{self.job}@{iteration}"

    def stop(self) -> None:
        """Its processes are gone; what it had begun of the iteration is to be done again."""
        self.epoch = 0
        self.serial += 1
        self.permit = self.phase = self.trainer = None
        self.training = self.shrunk = self.tail_said = False
        self.open_turns.clear()
        self.engines.clear()
