"""TOML files, and plain data as TOML text: what `--dry-run` prints can be read back as a file."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slackwater.model.errors import ConfigError


def read_toml(option: str, file: Path) -> dict[str, Any]:
    """The file's table; an error names the option that gave the file."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError.of(option, str(file), f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # also not UTF-8, or an integer of thousands of digits
        why = str(error).replace("Cannot overwrite a value", "a key is given twice")
        raise ConfigError.of(option, str(file), f"is not TOML: {why}") from None


def toml_text(table: Mapping[str, Any]) -> str:
    """Scalars and short lists first, then a section per table and per member of a table list."""
    return "\n".join(_lines(table, "")).strip("\n") + "\n"


def _lines(table: Mapping[str, Any], at: str) -> list[str]:
    lines = []
    sections: list[str] = []
    for key, value in table.items():
        path = f"{at}.{_key(key)}" if at else _key(key)
        if isinstance(value, Mapping):
            sections += ["", f"[{path}]", *_lines(value, path)]
        elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            for member in value:
                sections += ["", f"[[{path}]]", *_lines(member, path)]
        else:
            lines.append(f"{_key(key)} = {_scalar(value)}")
    return lines + sections


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else _text(key)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(key)} = {_scalar(item)}" for key, item in value.items())
        return f"{{ {', '.join(pairs)} }}"
    return repr(value)
