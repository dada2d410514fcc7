"""Follows a grammar: the tokens that may come next, per generation.

A guide depends only on the tokens so far, so a moved turn continues elsewhere unchanged.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from slackwater.grammar.compiled import LIMITS, compiled, refused
from slackwater.model.errors import ConfigError
from slackwater.model.sampling import Grammar


class GrammarGuides:
    """Makes guides for one model's vocabulary; the tokenizer is read when the first is wanted."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._file = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None

    def guide(
        self, grammar: Grammar, generated: Sequence[int], ends: Collection[int]
    ) -> "GrammarGuide":
        """A guide positioned after `generated`; tokens of `ends` are allowed where it may end."""
        matcher = LLMatcher(self._words(), compiled(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise refused(grammar, matcher.get_error())
        made = GrammarGuide(matcher, grammar, ends)
        for token in generated:
            made.advance(token)
        if made.failed is not None:
            raise ConfigError(made.failed)
        return made

    def _words(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = LLTokenizer(
                    self._file.read_text(), n_vocab=self._vocab_size, eos_token=self._eos or None
                )
            except (OSError, ValueError) as error:
                fix = f"cannot be used for a grammar: {error}"
                raise ConfigError.of("tokenizer", str(self._file), fix) from None
        return self._tokenizer


class GrammarGuide:
    """One generation's place in its grammar. A grammar that grows beyond all limits fails it."""

    def __init__(self, matcher: LLMatcher, grammar: Grammar, ends: Collection[int]) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._ends = frozenset(ends)
        self.failed: str | None = None
        self.stopped = False

    def allow(self, bits: NDArray[np.int32]) -> None:
        """Set the bit of every token that may come next, and no other."""
        found = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
            bits[:] = -1
            return
        width = min(len(found), len(bits))
        bits[:width] = found[:width]
        bits[width:] = 0
        if self._matcher.is_accepting():
            for token in self._ends:
                bits[token >> 5] |= np.uint32(1 << (token & 31)).view(np.int32)

    def advance(self, token: int) -> None:
        """The token was drawn. `stopped` says that nothing can follow it."""
        if self.stopped or self.failed is not None:
            return
        if token in self._ends:
            self.stopped = True
            return
        if not self._matcher.consume_token(token):
            self._fail(self._matcher.get_error())
            return
        self.stopped = self._matcher.is_stopped()

    def _fail(self, error: str) -> None:
        self.failed = str(refused(self._grammar, error))
