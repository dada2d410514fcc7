"""What goes into the engine and what comes out of a step."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from slackwater.model.errors import ConfigError
from slackwater.model.sampling import Grammar, Sampling

StopReason = Literal["stop", "length"]

Decode = Callable[[Sequence[int]], str]
_SLACK_TOKENS = 8  # a character may span tokens, and a tokenizer may merge spaces at the front


class Guide(Protocol):
    """Which tokens a grammar allows next in one generation. `stopped`: the answer is complete and
    no token can follow. `failed`: why the grammar cannot be followed any further.
    """

    stopped: bool
    failed: str | None

    def allow(self, bits: NDArray[np.int32]) -> None:
        """Fill a row of bits, one per token of the vocabulary, lowest bit first."""

    def advance(self, token: int) -> None:
        """Advance past the token that was sampled."""


class Guides(Protocol):
    """Compiles grammars into guides."""

    def guide(self, grammar: Grammar, generated: Sequence[int], ends: Collection[int]) -> Guide:
        """A guide positioned after `generated`; ConfigError if the grammar is not supported."""


def completes_stop_string(
    tokens: Sequence[int], stop_strings: Sequence[str], decode: Decode
) -> bool:
    """Whether the text of `tokens` contains a stop string; called after every token. Only the tail
    is decoded: a stop string of n bytes that ends in the newest token lies within the last n
    tokens, plus some slack.
    """
    window = max(len(text.encode()) for text in stop_strings) + _SLACK_TOKENS
    text = decode(tokens[-window:])
    return any(stop in text for stop in stop_strings)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation.

    `generated` are tokens that another engine sampled already: they count towards `max_tokens`, are
    not returned again, and the next token is the one that would have followed there. With
    `scores_prompt` the prompt's tokens are scored too. If several owners have requests, each gets
    its share of every step.
    """

    request_id: int
    prompt: tuple[int, ...]
    params: Sampling
    version: str
    generated: tuple[int, ...] = ()
    scores_prompt: bool = False
    owner: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.request_id < 2**32:
            raise ConfigError.of("request_id", self.request_id, "must fit 32 bits")
        if not self.prompt:
            raise ConfigError.of("prompt", self.prompt, "must hold at least one token")


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
class FinishedGeneration:
    """A request that ended in this step; its last token is in the same step's columns."""

    request_id: int
    reason: StopReason
    prompt_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request that no engine can continue: its grammar cannot be followed any further."""

    request_id: int
    error: str


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One step of all requests, by column: row i is one new token of `request_ids[i]`.

    A log-prob is the token's under the full distribution at the request's temperature, before
    penalties, masks, top-k and top-p (at temperature 0: under the model's own distribution).
    `top[request_id]` has one row.
    """

    request_ids: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    tokens: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    finished: tuple[FinishedGeneration, ...] = ()
    failed: tuple[RequestFailure, ...] = ()
    prompt_scores: tuple[PromptScoreRows, ...] = ()
    top: dict[int, TopTokens] = field(default_factory=dict)


def check_named_tokens(request: GenerationRequest, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary, and targets that are not one row per position."""
    params, rows = request.params, request.params.target_prompt_tokens
    biased = [token for token, _ in params.logit_bias]
    worded = [token for word in params.bad_words for token in word]
    named = (("logit_bias", biased), ("allowed_token_ids", params.allowed_token_ids))
    for name, tokens in (*named, ("bad_words", worded)):
        bad = [token for token in tokens if not 0 <= token < vocab_size]
        if bad:
            raise ConfigError.of(f"{name}: token", bad[0], f"must be below {vocab_size}")
    if rows and len(rows) != len(request.prompt) - 1:
        fix = f"must have {len(request.prompt) - 1} rows for this prompt"
        raise ConfigError.of("target_prompt_tokens", f"{len(rows)} rows", fix)
    bad = [token for row in rows for token in row if not -1 <= token < vocab_size]
    if bad:
        fix = f"must be below {vocab_size}, or -1"
        raise ConfigError.of("target_prompt_tokens: token", bad[0], fix)
