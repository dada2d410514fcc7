"""Rows of a CSV file (plain or .gz) as dataclasses; a bad row is named by its line."""

import csv
import dataclasses
import gzip
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from slackwater.model.config import unknown_key
from slackwater.model.errors import ConfigError

T = TypeVar("T")


def read_rows(path: Path, cls: type[T], *, ignore_other_columns: bool = False) -> Iterator[T]:
    """One `cls` per row, by column; fields with a default may be absent or empty."""
    fields = {field.name: field for field in dataclasses.fields(cast(Any, cls))}
    parsers = {name: _parser(hint) for name, hint in get_type_hints(cls).items()}
    needed = [name for name, field in fields.items() if _is_required(field)]
    for line, row in dict_rows(path, needed):
        at = f"{path.name} line {line}"
        values: dict[str, Any] = {}
        for name, text in row.items():
            if name not in fields:
                if not ignore_other_columns:
                    raise ConfigError(f"{at}: {name}: unknown column; {unknown_key(name, fields)}")
            elif text:
                values[name] = _parse(parsers[name], text, f"{at}: {name}")
            elif name in needed:
                raise ConfigError(f"{at}: {name}: missing; fill this column in every row")
        try:
            yield cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{at}: {error}") from None


def dict_rows(path: Path, needed: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Each row with its line number and its header's names; blank lines are passed over."""
    with open_text(path) as file:
        reader = csv.reader(file)
        header = [name.strip() for name in _next_row(reader, path) or []]
        for name in needed:
            if name not in header:
                raise ConfigError(
                    f"{path.name} line 1: {name}: missing column; write a header with "
                    f"{', '.join(needed)}"
                )
        while (row := _next_row(reader, path)) is not None:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(header):
                raise ConfigError(
                    f"{path.name} line {reader.line_num}: {len(row)} cells"
                    f" must be {len(header)}, one for each column of the header"
                )
            cells = (cell.strip() for cell in row)
            yield reader.line_num, dict(zip(header, cells, strict=True))


def open_text(path: Path) -> io.TextIOWrapper:
    """A text file to read, unpacked if its name ends in .gz."""
    try:
        raw = gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise ConfigError.of("file", str(path), f"cannot be read: {error.strerror}") from None
    return io.TextIOWrapper(cast(Any, raw), encoding="utf-8-sig", newline="")


def _next_row(reader: Any, path: Path) -> list[str] | None:
    try:
        return cast(list[str], next(reader))
    except StopIteration:
        return None
    except (csv.Error, UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        line = reader.line_num + 1
        raise ConfigError(f"{path.name} line {line}: is not a CSV row: {error}") from None


def _is_required(field: Any) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _parser(hint: Any) -> Callable[[str], Any]:
    arms = [arm for arm in get_args(hint) if arm is not type(None)]
    hint = arms[0] if arms else hint
    return cast(Callable[[str], Any], getattr(hint, "__supertype__", hint))


def _parse(parser: Callable[[str], Any], text: str, at: str) -> Any:
    try:
        value = parser(text)
    except ValueError:
        kind = "a whole number" if parser is int else "a number"
        raise ConfigError.of(at, text, f"must be {kind}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError.of(at, text, "must be a finite number")
    return value
