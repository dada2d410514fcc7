"""What goes into the engine and what comes out of a step."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from slackwater.model.errors import ConfigError
from slackwater.model.sampling import Sampling

StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation. `generated` are tokens already sampled elsewhere: they count in `max_tokens`,

    are not given out again, and the next token is the one that would have followed there. Where
    several owners have requests, each gets its share of every step.
    """

    request_id: int
    prompt: tuple[int, ...]
    params: Sampling
    version: str
    generated: tuple[int, ...] = ()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0
    owner: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.request_id < 2**32:
            raise ConfigError.of("request_id", self.request_id, "must fit 32 bits")
        if not self.prompt:
            raise ConfigError.of("prompt", self.prompt, "must hold at least one token")
        for name in ("topk_prompt_logprobs", "topk_logprobs"):
            if getattr(self, name) < 0:
                raise ConfigError.of(name, getattr(self, name), "must not be negative")

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs or self.topk_prompt_logprobs > 0


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The likeliest tokens at one or more positions, likeliest first: `[positions, k]` each."""

    tokens: NDArray[np.uint32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptScoreRows:
    """Log-probs of a prompt's tokens, at temperature 1; NaN at position 0, which nothing predicts.

    Row i of `top` holds the likeliest tokens for position i; row 0 is token 0 at -99999. Row i of
    `targets` and of `alternatives` (draws at the request's temperature) is for position i + 1.
    """

    request_id: int
    logprobs: NDArray[np.float32]
    top: TopTokens | None = None
    targets: tuple[NDArray[np.float32], ...] = ()
    alternatives: TopTokens | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended in this step, its last token being in the same step's columns."""

    request_id: int
    reason: StopReason
    prompt_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request that cannot go on, anywhere: its grammar could not be followed any further."""

    request_id: int
    error: str


def _no_ids() -> NDArray[np.uint32]:
    return np.empty(0, np.uint32)


def _no_logprobs() -> NDArray[np.float32]:
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One step of all requests, by column: row i is one new token of `request_ids[i]`.

    A log-prob is of the token under the whole distribution at the request's temperature, before
    anything shapes or cuts it (at temperature 0: under the model's own). `top[request_id]` has one
    row.
    """

    request_ids: NDArray[np.uint32] = field(default_factory=_no_ids)
    tokens: NDArray[np.uint32] = field(default_factory=_no_ids)
    logprobs: NDArray[np.float32] = field(default_factory=_no_logprobs)
    finished: tuple[Finished, ...] = ()
    failed: tuple[RequestFailure, ...] = ()
    prompt_scores: tuple[PromptScoreRows, ...] = ()
    top: dict[int, TopTokens] = field(default_factory=dict)
