"""A grammar as llguidance reads it, or one line that says what of it is not supported."""

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits

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
    """The one error of a grammar that is not supported."""
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
