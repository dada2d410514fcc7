"""Sampling parameters, on the wire, in control and in the engine.

A default seed comes from counters that a rerun repeats (the weights' lineage, the numbers of
request and sample), never from random ids or the clock.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from slackwater.model.errors import ConfigError, check_not_negative

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]


_COUNTS = (
    "max_tokens",
    "min_tokens",
    "topk_prompt_logprobs",
    "topk_logprobs",
    "prompt_alternatives",
)
_counts_of = attrgetter(*_COUNTS)


def default_seed(lineage: str, seq: int, index: int) -> int:
    digest = hashlib.blake2b(f"{lineage}\n{seq}\n{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sample_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th sample of a request with `seed`; the first has the seed itself."""
    return seed if index == 0 else default_seed(f"seed:{seed}", 0, index)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output. `source` is a JSON schema, a regular expression, a JSON list of
    choices, or a grammar in Lark's notation; `json_object` needs none.
    """

    kind: GrammarKind
    source: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` 0 is greedy; every other default changes nothing.

    `max_tokens` counts every token of the turn, wherever it was sampled; 0 scores the prompt only.
    A stop token ends the output and is part of it, as are the tokens of a stop string; before
    `min_tokens` neither ends it. The engine's own end tokens stop too, unless `ignore_eos`.

    Penalties look at the tokens so far: presence and frequency at the generated ones, repetition at
    the prompt's too. `logit_bias` is added to tokens' logits; with `allowed_token_ids` no others
    are drawn. `bad_words` are sequences of tokens: none of them is ever generated whole. All of it
    depends on the tokens only, so a turn that moves continues as if it had not.

    Of the prompt: log-probs of its tokens, of the likeliest, of `target_prompt_tokens` (a row of
    tokens for every position after the first; -1 asks for nothing), and `prompt_alternatives` draws
    for each position.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    grammar: Grammar | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0
    target_prompt_tokens: Sequence[Sequence[int]] = ()
    prompt_alternatives: int = 0

    def __post_init__(self) -> None:
        counts = _counts_of(self)
        if not (min(counts) >= 0 and sum(counts) >= 0):  # `min` may pass over a NaN
            check_not_negative("", self, *_COUNTS)
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError.of("temperature", self.temperature, "must be 0 or above, and finite")
        if not 0 < self.top_p <= 1:
            raise ConfigError.of("top_p", self.top_p, "must be above 0 and at most 1")
        if self.top_k < 0:
            raise ConfigError.of("top_k", self.top_k, "must not be negative (0 is no limit)")
        if not 0 <= self.min_p <= 1:
            raise ConfigError.of("min_p", self.min_p, "must be 0 to 1")
        if "" in self.stop_strings:
            raise ConfigError.of("stop_strings", "", "must not hold an empty string")
        if self.min_tokens > self.max_tokens:
            fix = f"must be at most max_tokens ({self.max_tokens})"
            raise ConfigError.of("min_tokens", self.min_tokens, fix)
        if self.penalised or self.logit_bias:
            self._check_penalties()
        if self.grammar is not None and self.min_tokens:
            fix = "must be 0 with a grammar, which decides itself when it ends"
            raise ConfigError.of("min_tokens", self.min_tokens, fix)
        if self.allowed_token_ids and (self.grammar is not None or self.min_tokens):
            fix = "cannot be combined with a grammar or min_tokens: nothing might be left to draw"
            raise ConfigError.of("allowed_token_ids", list(self.allowed_token_ids)[:3], fix)
        if self.bad_words:
            self._check_bad_words()

    def _check_bad_words(self) -> None:
        if self.grammar is not None or self.allowed_token_ids:
            fix = (
                "cannot be combined with a grammar or allowed tokens: nothing might be left to draw"
            )
            raise ConfigError.of("bad_words", len(self.bad_words), fix)
        if any(not len(word) for word in self.bad_words):
            raise ConfigError.of("bad_words", [], "must not hold an empty one")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ConfigError.of(name, getattr(self, name), "must be -2 to 2")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ConfigError.of("repetition_penalty", self.repetition_penalty, "must be above 0")
        for token, bias in self.logit_bias:
            if not -100 <= bias <= 100:
                raise ConfigError.of(f"logit_bias[{token}]", bias, "must be -100 to 100")

    @property
    def penalised(self) -> bool:
        """Whether penalties depend on the tokens so far."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def scores_prompt(self) -> bool:
        return bool(
            self.prompt_logprobs
            or self.topk_prompt_logprobs
            or self.target_prompt_tokens
            or self.prompt_alternatives
        )

    @property
    def shaped(self) -> bool:
        """Whether logits are changed before a token is drawn from them."""
        return bool(
            self.penalised
            or self.min_p
            or self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.grammar is not None
        )

    @property
    def looks_back(self) -> bool:
        """Whether an engine needs the generated tokens to continue."""
        return (
            self.penalised
            or bool(self.min_tokens)
            or bool(self.bad_words)
            or self.grammar is not None
        )
