"""Turns: one generation request each, as its owner (the rollout manager) describes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from slackwater.model.errors import ConfigError
from slackwater.model.ids import JobId, TrajectoryId, TurnId

# One dispatch of one turn to one instance; unique for the life of a manager, and the request id that
# the engine sees. A reply that names an older attempt is late and is discarded.
AttemptId = NewType("AttemptId", int)


class FinishReason(StrEnum):
    """Why a turn ended well."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `max_tokens` counts every token of the turn, wherever it was sampled."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens <= 0:
            raise ConfigError.of("sampling: max_tokens", self.max_tokens, "must be above 0")


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """One turn: what to generate, with which weights, and until when.

    `version` names the weights; `also_versions` are older ones that the job's staleness allows.
    `deadline_s` is on the manager's clock; without one the manager's own limit holds.
    `stream` asks for an `AppendTokens` command for every accepted frame.
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

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise ConfigError.of(f"turn {self.turn}: prompt", [], "must hold at least one token")
