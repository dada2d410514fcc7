"""Parses and validates large JSON bodies in a helper process, off the event loop.

Token ids come back as arrays, which unpickle fast; the number of all other values is limited.
"""

import contextlib
import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
MAX_VALUES = 20_000
_MIN_ARRAY_LENGTH = 64
_MAX_ERRORS = 3


def find_text_error(body: bytes) -> str | None:
    """Why the bytes of a JSON text are not valid UTF-8 text; None if they are.

    `json.loads` guesses UTF-16 and UTF-32 from NUL bytes, and accepts lone surrogates, which cannot
    be encoded later: not for the log, the channel or an answer.
    """
    if b"\0" in body:
        return "contains a NUL byte; send UTF-8"
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8 ({error.reason}); send UTF-8"
    half = _lone_surrogate(body)
    return None if half is None else f"{half} is half of a surrogate pair; send both halves"


def _lone_surrogate(body: bytes) -> str | None:
    """The first lone `\\ud800` to `\\udfff` escape of a JSON text, as written."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return None
    high: re.Match[bytes] | None = None
    for escape in _ESCAPE.finditer(body):
        code = int(escape[1], 16) if escape[1] else 0
        if high is not None and (not 0xDC00 <= code <= 0xDFFF or escape.start() != high.end()):
            return high[0].decode()
        if 0xDC00 <= code <= 0xDFFF and high is None:
            return escape[0].decode()
        high = escape if 0xD800 <= code <= 0xDBFF else None
    return None if high is None else high[0].decode()


@dataclass(frozen=True, slots=True)
class InvalidBody:
    """Errors as pydantic reports them, and the plain fields that identify an operation."""

    errors: list[dict[str, Any]]
    named: dict[str, Any]


def read_body(kind: type[BaseModel], body: bytes) -> BaseModel | InvalidBody:
    """Parse one body by the same rules as small ones."""
    if (broken := find_text_error(body)) is not None:
        return _invalid("value_error", broken)
    try:
        plain = json.loads(body)
    except json.JSONDecodeError as error:
        return _invalid("json_invalid", "JSON decode error", error.pos)
    except (RecursionError, ValueError) as error:
        return _invalid("json_invalid", f"cannot be parsed as JSON: {error}")
    fields = plain if isinstance(plain, dict) else {}
    named = {key: fields[key] for key in ("model_id", "seq_id") if _is_plain(fields.get(key))}
    if (values := _count(plain)) > MAX_VALUES:
        message = f"{values} values beside token ids, must be at most {MAX_VALUES}"
        return InvalidBody(_invalid("value_error", message).errors, named)
    try:
        checked = kind.model_validate(plain)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        return InvalidBody(
            [{**each, "loc": ("body", *each["loc"])} for each in found[:_MAX_ERRORS]], named
        )
    _pack_fields(checked)
    return checked


def _invalid(kind: str, message: str, *place: int) -> InvalidBody:
    return InvalidBody([{"type": kind, "loc": ("body", *place), "msg": message}], {})


def _is_plain(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and len(value) < 1000)


def _count(value: Any) -> int:
    """Count values up to the limit; numbers in lists of numbers are free, strings in lists 1/8."""
    found, left = 0, [iter((value,))]
    while left and found <= MAX_VALUES:
        for each in left[-1]:
            found += 1
            if _are_all(each, str):
                found += len(each) // 8
                continue
            children = _children(each)
            if children is not None:
                left.append(children)
                break
        else:
            left.pop()
    return found


def _children(value: Any) -> Iterator[Any] | None:
    if isinstance(value, dict):
        return iter(value.values())
    if isinstance(value, list) and not _are_all(value, int):
        return iter(value)
    return None


def _are_all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is kind for each in value)


def _pack_fields(body: BaseModel) -> None:
    """Replace long lists of integers by arrays, at any depth of models and lists."""
    for name in type(body).model_fields:
        body.__dict__[name] = _pack_value(getattr(body, name))


def _pack_value(value: Any) -> Any:
    if isinstance(value, BaseModel):
        _pack_fields(value)
        return value
    if _are_all(value, int) and len(value) > _MIN_ARRAY_LENGTH:
        with contextlib.suppress(OverflowError):
            return array("q", value)
    if isinstance(value, list):
        return [_pack_value(each) for each in value]
    return value
