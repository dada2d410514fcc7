"""Turns: one generation request each, as the rollout manager describes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from slackwater.model.errors import ConfigError, check_above_zero
from slackwater.model.ids import NOBODY, JobId, TenantId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling

# One dispatch of one turn to one instance; unique for the life of a manager, and the request id
# that the engine sees. A reply of an older attempt is late and is discarded.
AttemptId = NewType("AttemptId", int)


class FinishReason(StrEnum):
    """Why a complete turn ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """One turn: what to generate, with which weights, and until when.

    `job` owns it; `base_model` is what the weights are made from. `version` names the weights;
    `also_versions` are older ones that the job's staleness allows. `deadline_s` is on the manager's
    clock; without one the manager's own limit holds. `stream` asks for an `AppendTokens` command
    for every accepted frame. `owner` is the tenant whose share it uses.
    """

    turn: TurnId
    trajectory: TrajectoryId
    job: JobId
    prompt: Sequence[int]
    sampling: Sampling
    version: str
    also_versions: Sequence[str] = ()
    deadline_s: float | None = None
    stream: bool = False
    owner: TenantId = NOBODY
    base_model: str = ""

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise ConfigError.of(f"turn {self.turn}: prompt", [], "must hold at least one token")
        if not self.sampling.max_tokens > 0:
            check_above_zero("sampling: ", self.sampling, "max_tokens")
