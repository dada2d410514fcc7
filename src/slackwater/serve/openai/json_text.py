"""JSON in slices, because one `json.dumps` of a long answer blocks every other thread."""

import json
from collections.abc import Iterator
from typing import Any

_AT_ONCE = 64
_DEEP = 6


def sliced_json(value: Any) -> bytes:
    """What `json.dumps` writes, but that other threads go between."""
    return "".join(_pieces(value, _DEEP)).encode()


def _pieces(value: Any, deep: int) -> Iterator[str]:
    if deep and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        before = "{"
        for key, inside in value.items():
            yield f"{before}{json.dumps(key)}: "
            yield from _pieces(inside, deep - 1)
            before = ", "
        yield "}" if value else "{}"
    elif deep and isinstance(value, list) and len(value) and isinstance(value[0], dict | list):
        before = "["
        for inside in value:
            yield before
            yield from _pieces(inside, deep - 1)
            before = ", "
        yield "]"
    elif isinstance(value, list) and len(value) > _AT_ONCE:
        before = "["
        for start in range(0, len(value), _AT_ONCE):
            yield before + json.dumps(value[start : start + _AT_ONCE], allow_nan=False)[1:-1]
            before = ", "
        yield "]"
    else:
        yield json.dumps(value, allow_nan=False)
