"""Follows a grammar: the tokens that may come next, per generation.

A guide depends only on the tokens so far, so a moved turn continues elsewhere unchanged.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from slackwater.model.errors import ConfigError
from slackwater.model.sampling import Grammar

# No free whitespace: a model that has nothing to say would write blanks until its tokens are used
# up.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DRAFTS_WITH_ONE_MEANING = ("2019-09", "2020-12")  # of a $ref beside a $id
_MAX_SOURCE_CHARACTERS = 1 << 20
LIMITS = LLParserLimits(verbose_errors=False)


def compiled(grammar: Grammar) -> str:
    """The text that a matcher is made of; what cannot be read at all is refused here."""
    if len(grammar.source) > _MAX_SOURCE_CHARACTERS:
        fix = f"characters are too many; at most {_MAX_SOURCE_CHARACTERS}"
        raise ConfigError.of(grammar.kind, len(grammar.source), fix)
    try:
        return _text(grammar)
    except RecursionError:
        raise ConfigError(f"{grammar.kind}: is nested too deep") from None


def _text(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return _schema(_json(grammar))
        case "json_object":
            return _schema({"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            return _choice(_json(grammar))
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.source)


def check(grammar: Grammar) -> None:
    """Refuse a grammar that cannot be followed, and name what in it cannot."""
    error = LLMatcher.validate_grammar(compiled(grammar), limits=LIMITS)
    if error:
        raise refused(grammar, error)


def refused(grammar: Grammar, error: str) -> ConfigError:
    line = next((line.strip() for line in error.splitlines() if line.strip()), "no reason given")
    return ConfigError(f"{grammar.kind}: is not supported: {line[:300]}")


def _schema(schema: Any) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ConfigError.of("json_schema", schema, "must be an object")
    if not any(draft in str(schema.get("$schema")) for draft in _DRAFTS_WITH_ONE_MEANING):
        _refuse_moved_references(schema)
    try:
        return LLMatcher.grammar_from_json_schema(
            {key: value for key, value in schema.items() if key != "x-guidance"},
            overrides=_JSON_STYLE,
        )
    except ValueError as error:
        raise ConfigError(f"json_schema: cannot be read: {error}") from None


def _refuse_moved_references(schema: Any) -> None:
    """A `$id` beside a `$ref` changes the reference in some drafts of JSON Schema only."""
    if isinstance(schema, dict):
        if "$id" in schema and "$ref" in schema and schema["$ref"] and not _is_local(schema):
            raise ConfigError("json_schema: is not supported: $id beside $ref; write one of them")
        for inner in schema.values():
            _refuse_moved_references(inner)
    elif isinstance(schema, list):
        for inner in schema:
            _refuse_moved_references(inner)


def _is_local(schema: dict[str, Any]) -> bool:
    return isinstance(schema["$ref"], str) and schema["$ref"].startswith("#")


def _choice(choices: Any) -> str:
    good = isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)
    if not good:
        raise ConfigError.of("choice", choices, "must be a list of strings that are not empty")
    alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return LLMatcher.grammar_from_lark(f"start: {alternatives}")


def _json(grammar: Grammar) -> Any:
    try:
        return json.loads(grammar.source)
    except ValueError as error:
        raise ConfigError(f"{grammar.kind}: is not JSON: {error}") from None


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
