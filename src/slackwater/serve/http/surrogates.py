"""Half characters: JSON can spell what is no text, and no tokenizer, file or database takes it."""

import re

_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)


def lone_surrogate(body: bytes) -> str | None:
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
