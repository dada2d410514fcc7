"""Prompts of a data set, with a verifier that scores each answer; one turn."""

import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from slackwater.model.errors import ConfigError, RefusedError
from slackwater.rl.environments.episode import Question
from slackwater.rl.text import Observation

Row = Mapping[str, Any]
_INSTALL = "pip install -c constraints.txt '.[data]'"


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
        raise RefusedError(f"Parquet needs pyarrow: {_INSTALL}") from None
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
        raise RefusedError(f"data {str(source)!r} needs the package datasets: {_INSTALL}") from None
    try:
        if isinstance(source, Path):
            dataset = datasets.load_from_disk(str(source))
            dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
        else:
            dataset = datasets.load_dataset(source, split=split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).partition("\n")[0]
        fix = f"must be a .jsonl or .parquet file, or a data set that loads: {reason}"
        raise ConfigError.of("data", str(source), fix) from None
    rows: Sequence[Row] = dataset.to_list()
    return rows


Verifier = Callable[[str, Row], float]


@lru_cache(maxsize=16)
def load_verifier(name: str, answer: str) -> Verifier:
    """`exact`, `regex:PATTERN` or `MODULE:FUNCTION`; `answer` is the column of right answers."""
    if name == "exact":
        return lambda text, row: float(text.strip() == str(row.get(answer, "")).strip())
    kind, _, rest = name.partition(":")
    if kind == "regex" and rest:
        return _pattern_verifier(rest, answer)
    if kind and rest:
        return _function_verifier(name, kind, rest)
    fix = "must be exact, regex:PATTERN or MODULE:FUNCTION"
    raise ConfigError.of("environment.verifier", name, fix)


def _pattern_verifier(pattern: str, answer: str) -> Verifier:
    """The last match (its first group, if any) must be the answer; without an answer, any match."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError.of("environment.verifier", pattern, f"is no pattern: {error}") from None

    def verify(text: str, row: Row) -> float:
        matches = list(compiled.finditer(text))
        if not matches or row.get(answer) is None:
            return float(bool(matches))
        answer_text = matches[-1][1 if compiled.groups else 0]
        return float((answer_text or "").strip() == str(row[answer]).strip())

    return verify


def _function_verifier(name: str, module: str, function: str) -> Verifier:
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the current folder, as with `python -m`
    try:
        function_object: Any = importlib.import_module(module)
        for part in function.split("."):
            function_object = getattr(function_object, part)
    except (ImportError, AttributeError) as error:
        fix = f"cannot be imported: {error}"
        raise ConfigError.of("environment.verifier", name, fix) from None
    if not callable(function_object):
        raise ConfigError.of("environment.verifier", name, "is no function")

    def verify(text: str, row: Row) -> float:
        reward = function_object(text, row)
        if not isinstance(reward, (bool, int, float)) or not math.isfinite(reward):
            fix = f"must return a finite number, not {reward!r}"
            raise ConfigError.of("environment.verifier", name, fix)
        return float(reward)

    return verify


@dataclass(frozen=True, slots=True)
class DataTasks:
    """Rows of `data`, by the names of its columns.

    A prompt is text, or a list of chat messages. `verifier` is `exact`, `regex:PATTERN` or
    `MODULE:FUNCTION`. Supervised recipes read `answer`, or a column `messages` whose last message
    is the answer; preference recipes read `chosen` and `rejected`.
    """

    data: str = ""
    kind: Literal["data"] = "data"
    split: str = "train"
    prompt: str = "prompt"
    answer: str = "answer"
    chosen: str = "chosen"
    rejected: str = "rejected"
    verifier: str = "exact"
    instruction: str = ""

    @property
    def rows(self) -> Sequence[Row]:
        return read_rows(self.data, self.split)

    @property
    def prompts(self) -> int:
        return len(self.rows)

    def episode(self, prompt: int) -> Question[Observation]:
        row = self._row(prompt)
        if self.verifier == "exact":
            cell(row, self.answer, self.data)
        verifier = load_verifier(self.verifier, self.answer)
        return Question(self.observation(row), lambda text: verifier(text, row))

    def demonstration(self, prompt: int) -> tuple[tuple[Observation, str], ...]:
        """A row's prompt with its answer."""
        row = self._row(prompt)
        return ((self.observation(row), self.answer_of(row)),)

    def _row(self, prompt: int) -> Row:
        return self.rows[prompt % self.prompts]

    def observation(self, row: Row) -> Observation:
        """The prompt, after the instruction."""
        if self.prompt not in row and isinstance(row.get("messages"), list):
            prompt: object = row["messages"][:-1]
        else:
            prompt = cell(row, self.prompt, self.data)
        if isinstance(prompt, str):
            return f"{self.instruction}{prompt}"
        return _messages(prompt, self.prompt)

    def answer_of(self, row: Row, column: str = "") -> str:
        """The text of an answer: a string, or the last message of a list."""
        column = column or (
            "messages" if self.answer not in row and "messages" in row else self.answer
        )
        answer = cell(row, column, self.data)
        return _messages(answer, column)[-1]["content"] if isinstance(answer, list) else str(answer)


def _messages(value: object, column: str) -> list[dict[str, str]]:
    if isinstance(value, list) and value:
        messages = [
            {"role": str(item.get("role")), "content": str(item.get("content", ""))}
            for item in value
            if isinstance(item, dict)
        ]
        if len(messages) == len(value):
            return messages
    fix = "must be text or a list of messages with role and content"
    raise ConfigError.of(f"column {column}", str(value)[:50], fix)
