"""Guides: which tokens a grammar allows next in a generation.

A guide depends only on the tokens so far, so a turn that moves to another engine continues
unchanged.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from slackwater.model.errors import ConfigError
from slackwater.model.sampling import Grammar

# No free whitespace: a model could otherwise write blanks until its tokens are used up.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_UNAMBIGUOUS_DRAFTS = ("2019-09", "2020-12")  # they define what a $ref beside a $id means
_MAX_SOURCE_CHARACTERS = 1 << 20
LIMITS = LLParserLimits(verbose_errors=False)


def compile_grammar(grammar: Grammar) -> str:
    """The matcher's source text of a grammar; refuses one that cannot be parsed."""
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
    """Refuse a grammar that is not supported; the error names the feature."""
    error = LLMatcher.validate_grammar(compile_grammar(grammar), limits=LIMITS)
    if error:
        raise grammar_error(grammar, error)


def grammar_error(grammar: Grammar, error: str) -> ConfigError:
    line = next((line.strip() for line in error.splitlines() if line.strip()), "no reason given")
    return ConfigError(f"{grammar.kind}: is not supported: {line[:300]}")


def _schema(schema: Any) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ConfigError.of("json_schema", schema, "must be an object")
    if not any(draft in str(schema.get("$schema")) for draft in _UNAMBIGUOUS_DRAFTS):
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
    inner: Iterable[Any] = schema if isinstance(schema, list) else ()
    if isinstance(schema, dict):
        inner, reference = schema.values(), schema.get("$ref")
        is_local = isinstance(reference, str) and reference.startswith("#")
        if "$id" in schema and reference and not is_local:
            raise ConfigError("json_schema: is not supported: $id beside $ref; write one of them")
    for each in inner:
        _refuse_moved_references(each)


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
    """Makes guides for one model's vocabulary; the tokenizer is loaded for the first one."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._file = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None

    def guide(
        self, grammar: Grammar, generated: Sequence[int], ends: Collection[int]
    ) -> "GrammarGuide":
        """A guide positioned after `generated`; tokens of `ends` are allowed where the text may
        end.
        """
        matcher = LLMatcher(
            self._load_tokenizer(), compile_grammar(grammar), log_level=0, limits=LIMITS
        )
        if matcher.is_error():
            raise grammar_error(grammar, matcher.get_error())
        guide = GrammarGuide(matcher, grammar, ends)
        for token in generated:
            guide.advance(token)
        if guide.failed is not None:
            raise ConfigError(guide.failed)
        return guide

    def _load_tokenizer(self) -> LLTokenizer:
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
    """One generation's position in its grammar. It fails if the parser exceeds its limits."""

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
        """Advance past a sampled token; sets `stopped` if nothing can follow it."""
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
        self.failed = str(grammar_error(self._grammar, error))
