"""Rows of a data set: JSON lines, Parquet, or whatever `datasets` loads."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from slackwater.model.errors import ConfigError, RefusedError

Row = Mapping[str, Any]
_NEEDS = "pip install -c constraints.txt '.[data]'"


@lru_cache(maxsize=4)
def read_rows(data: str, split: str = "train") -> Sequence[Row]:
    """All rows of `FILE.jsonl`, `FILE.parquet`, a folder of `datasets`, or ORG/NAME of the hub."""
    if not data:
        raise ConfigError.of("environment.data", data, "must name a data set: --data FILE")
    path = Path(data).expanduser()
    if path.suffix in (".jsonl", ".ndjson"):
        rows: Sequence[Row] = _json_lines(path)
    elif path.suffix == ".parquet":
        rows = _parquet(path)
    else:
        rows = _datasets(path if path.exists() else data, split)
    if not rows:
        raise ConfigError.of("data", data, "has no rows")
    return rows


def cell(row: Row, column: str, data: str) -> Any:
    """A row's value, which must be there."""
    if row.get(column) is None:
        fix = f"is not a column of {data}, or empty in a row; it has {', '.join(row)}"
        raise ConfigError.of("column", column, fix)
    return row[column]


def _json_lines(path: Path) -> list[Row]:
    rows: list[Row] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        fix = f"must have an object on every line, not as line {number}"
                        raise ConfigError.of("data", str(path), fix)
                    rows.append(row)
    except OSError as error:
        raise ConfigError.of("data", str(path), f"cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        fix = f"must be JSON lines; line {len(rows) + 1}: {error}"
        raise ConfigError.of("data", str(path), fix) from None
    return rows


def _parquet(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise RefusedError(f"Parquet needs pyarrow: {_NEEDS}") from None
    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError.of("data", str(path), f"cannot be read: {reason}") from None
    except pyarrow.ArrowException as error:
        raise ConfigError.of("data", str(path), f"must be Parquet: {error}") from None
    return rows


def _datasets(source: Path | str, split: str) -> Sequence[Row]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise RefusedError(f"data {str(source)!r} needs the package datasets: {_NEEDS}") from None
    try:
        if isinstance(source, Path):
            found = datasets.load_from_disk(str(source))
            found = found[split] if isinstance(found, datasets.DatasetDict) else found
        else:
            found = datasets.load_dataset(source, split=split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        fix = f"must be a .jsonl or .parquet file, or a data set that loads: {reason}"
        raise ConfigError.of("data", str(source), fix) from None
    rows: Sequence[Row] = found.to_list()
    return rows
