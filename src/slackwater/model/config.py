"""Converts tables (TOML, JSON, `--set`) to frozen dataclasses, and back.

Each component defines its configuration as a dataclass. Unknown keys are refused with a suggestion,
and every error is one line that names the field by its path (`fleet.rollout.max_nodes`,
`jobs[3].slo`), the value and the fix. A union of dataclasses is discriminated by a `Literal` field
that all of them have under the same name.
"""

import copy
import dataclasses
import difflib
import sys
import tomllib
import types
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from slackwater.model.errors import ConfigError

T = TypeVar("T")

_UNITS: Mapping[str, str] = {
    "s": "seconds",
    "ms": "milliseconds",
    "h": "hours",
    "gb": "gigabytes",
    "bytes": "bytes",
    "tokens": "tokens",
    "gbit_per_s": "gigabits per second",
    "price_per_h": "dollars per hour",
}
_TEXT = 'text, written "..."'
_OTHER_UNITS = (
    "sec",
    "secs",
    "seconds",
    "min",
    "mins",
    "minutes",
    "hours",
    "d",
    "days",
    "mb",
    "tb",
)


def decode(
    cls: type[T], table: Mapping[str, Any], at: str = "", prebuilt: Mapping[str, Any] | None = None
) -> T:
    """Build `cls` from a table; `at` is the table's own path, empty at the root of a file.

    `prebuilt` has fields that the caller built itself, such as a policy chosen by its name.
    """
    if not isinstance(table, Mapping):
        raise ConfigError.of(at or "file", table, "must be a table")
    fields = {field.name: field for field in dataclasses.fields(cast(Any, cls)) if field.init}
    hints = get_type_hints(cls)
    for key in table:
        if key not in fields:
            raise ConfigError(f"{_join(at, key)}: unknown key; {unknown_key(key, fields)}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if prebuilt is not None and name in prebuilt:
            values[name] = prebuilt[name]
        elif name in table:
            value = table[name]
            if dataclasses.is_dataclass(hints[name]) and isinstance(value, Mapping):
                value = _default_table(field) | dict(value)
            values[name] = _convert(hints[name], value, _join(at, name))
        elif default_of(field) is dataclasses.MISSING:
            fix = f"write {name} = {_describe_hint(hints[name]).removeprefix('text, written ')}"
            if dataclasses.is_dataclass(hints[name]):
                fix = f"add the table [{_join(at, name)}]"
            raise ConfigError(f"{_join(at, name)}: missing; {fix}")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(_locate(at, str(error))) from None


def default_of(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _default_table(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    """The default of a field whose class may have other defaults, as a table."""
    default = default_of(field)
    return plain(default) if dataclasses.is_dataclass(default) else {}


def override(table: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """A copy of `table` with each `a.b=c` set; list members by number (`jobs.0.slo=1.5`)."""
    result = copy.deepcopy(dict(table))
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError.of("--set", assignment, "must be written a.b=value")
        _put(result, keys, _scalar(text.strip()), assignment)
    return result


def plain(value: Any) -> Any:
    """A configuration as tables, lists and scalars, without `None` values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.init
        }
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, PurePath) else value


def flatten(table: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """The values of nested tables by their paths, such as `fleet.rollout.max_nodes`."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        path = _join(at, str(key))
        found |= flatten(value, path) if isinstance(value, Mapping) else {path: value}
    return found


def _locate(at: str, message: str) -> str:
    """Prefix a dataclass's message with the path of its table, without repeating the last key."""
    own = at.rpartition(".")[2]
    return f"{at}: {message.removeprefix(f'{own}: ')}" if at else message


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def unknown_key(key: str, fields: Iterable[str]) -> str:
    """A suggestion for a key that is none of `fields`."""
    names = list(fields)
    for name in names:
        stem, _, unit = name.rpartition("_")
        others = (f"{stem}_{other}" for other in (*_UNITS, *_OTHER_UNITS))
        if stem and unit in _UNITS and key in {stem, *others}:
            return f"write {name}, in {_UNITS[unit]}"
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(sorted(names))}"


def _describe_hint(hint: Any) -> str:
    """The values that a type hint accepts, in words."""
    origin = get_origin(hint)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    if _is_union(hint):
        return _describe_hint(next(arm for arm in get_args(hint) if arm is not type(None)))
    if origin in (tuple, list):
        return "[...]"
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: _TEXT,
        Path: "a path",
    }
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(repr(member.value) for member in hint)
    return names.get(getattr(hint, "__supertype__", hint), "a table")


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _convert(hint: Any, value: Any, at: str) -> Any:
    hint = getattr(hint, "__supertype__", hint)  # a NewType converts like its base
    origin = get_origin(hint)
    if _is_union(hint):
        return _convert_union(hint, value, at)
    if origin is Literal:
        return _convert_choice(get_args(hint), value, at)
    if origin in (tuple, list):
        return _convert_list(hint, value, at)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError.of(at, value, "must be a table")
        member = get_args(hint)[1]
        return {
            str(key): _convert(member, item, _join(at, str(key))) for key, item in value.items()
        }
    if dataclasses.is_dataclass(hint):
        return decode(cast(Any, hint), value, at)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(_convert_choice(tuple(member.value for member in hint), value, at))
    return _convert_scalar(hint, value, at)


def _convert_list(hint: Any, value: Any, at: str) -> Any:
    if not isinstance(value, list):
        raise ConfigError.of(at, value, "must be a list, written [a, b]")
    arms = get_args(hint)
    if get_origin(hint) is list:
        return [_convert(arms[0], item, f"{at}[{i}]") for i, item in enumerate(value)]
    if len(arms) == 2 and arms[1] is Ellipsis:
        return tuple(_convert(arms[0], item, f"{at}[{i}]") for i, item in enumerate(value))
    if len(arms) != len(value):
        raise ConfigError.of(at, value, f"must have {len(arms)} members")
    members = enumerate(zip(arms, value, strict=True))
    return tuple(_convert(arm, item, f"{at}[{i}]") for i, (arm, item) in members)


def _convert_union(hint: Any, value: Any, at: str) -> Any:
    arms = [arm for arm in get_args(hint) if arm is not type(None)]
    if len(arms) == 1:
        return _convert(arms[0], value, at)
    tables = [arm for arm in arms if dataclasses.is_dataclass(arm)]
    if isinstance(value, Mapping) and tables:
        if len(tables) == 1:
            return decode(cast(Any, tables[0]), value, at)
        return _convert_tagged(tables, value, at)
    for arm in arms:
        if isinstance(arm, type) and isinstance(value, arm) and not isinstance(value, bool):
            return value
    raise ConfigError.of(at, value, f"must be {' or '.join(_describe_hint(arm) for arm in arms)}")


def _convert_tagged(arms: list[Any], value: Mapping[str, Any], at: str) -> Any:
    hints = [get_type_hints(arm) for arm in arms]
    shared = [
        name for name in hints[0] if all(get_origin(hint.get(name)) is Literal for hint in hints)
    ]
    assert shared, f"{at}: a union needs a Literal field that all its members have"
    tag = shared[0]
    tags = {
        choice: arm for arm, hint in zip(arms, hints, strict=True) for choice in get_args(hint[tag])
    }
    if tag not in value:
        raise ConfigError(f"{_join(at, tag)}: missing; write {' or '.join(map(repr, tags))}")
    return decode(tags[_convert_choice(tuple(tags), value[tag], _join(at, tag))], value, at)


def _convert_choice(choices: tuple[Any, ...], value: Any, at: str) -> Any:
    if value in choices and type(value) in {type(choice) for choice in choices}:
        return value
    names = [str(choice) for choice in choices]
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.7)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ConfigError.of(at, value, f"must be one of {', '.join(names)}{hint}")


def _convert_scalar(hint: Any, value: Any, at: str) -> Any:
    if hint is Any:
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not -sys.float_info.max <= value <= sys.float_info.max:  # NaN is not, either
            raise ConfigError.of(at, value, "must be a finite number")
        return float(value)
    if isinstance(hint, type) and issubclass(hint, PurePath) and isinstance(value, str):
        return hint(value)
    if isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    unit = next((words for key, words in _UNITS.items() if at.endswith(f"_{key}")), None)
    in_unit = f" of {unit}, without a unit" if unit and hint in (int, float) else ""
    raise ConfigError.of(at, value, f"must be {_describe_hint(hint)}{in_unit}")


def _put(table: Any, keys: list[str], value: Any, assignment: str) -> None:
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(table, list):
            if not key.isdigit() or int(key) >= len(table):
                raise ConfigError.of(
                    "--set", assignment, f"must name a member 0 to {len(table) - 1}, not {key}"
                )
            if last:
                table[int(key)] = value
            else:
                table = table[int(key)]
        elif not isinstance(table, dict):
            raise ConfigError.of("--set", assignment, f"goes into {keys[depth - 1]}, a plain value")
        elif last:
            table[key] = value
        else:
            table = table.setdefault(key, {})


def _scalar(text: str) -> Any:
    """A value as TOML reads it; anything else is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # not TOML, or an integer of thousands of digits
        return text
