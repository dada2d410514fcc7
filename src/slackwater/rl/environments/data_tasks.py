"""Prompts of a data set, with a verifier that scores each answer; one turn."""

import importlib
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from slackwater.model.errors import ConfigError
from slackwater.rl.data_files import Row, cell, read_rows
from slackwater.rl.environments.episode import EnvironmentReply
from slackwater.rl.text import Observation

Verifier = Callable[[str, Row], float]


@lru_cache(maxsize=16)
def load_verifier(name: str, answer: str) -> Verifier:
    """`exact`, `regex:PATTERN` or `MODULE:FUNCTION`; `answer` is the column of right answers."""
    if name == "exact":
        return lambda text, row: float(text.strip() == str(row.get(answer, "")).strip())
    kind, _, rest = name.partition(":")
    if kind == "regex" and rest:
        return _by_pattern(rest, answer)
    if kind and rest:
        return _by_function(name, kind, rest)
    fix = "must be exact, regex:PATTERN or MODULE:FUNCTION"
    raise ConfigError.of("environment.verifier", name, fix)


def _by_pattern(pattern: str, answer: str) -> Verifier:
    """The last match, its first group if it has one, must be the answer; without one, a match."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError.of("environment.verifier", pattern, f"is no pattern: {error}") from None

    def verify(text: str, row: Row) -> float:
        matches = list(compiled.finditer(text))
        if not matches or row.get(answer) is None:
            return float(bool(matches))
        said = matches[-1][1 if compiled.groups else 0]
        return float((said or "").strip() == str(row[answer]).strip())

    return verify


def _by_function(name: str, module: str, function: str) -> Verifier:
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module beside the recipe, as `python -m` would find it
    try:
        called: Any = importlib.import_module(module)
        for part in function.split("."):
            called = getattr(called, part)
    except (ImportError, AttributeError) as error:
        fix = f"cannot be imported: {error}"
        raise ConfigError.of("environment.verifier", name, fix) from None
    if not callable(called):
        raise ConfigError.of("environment.verifier", name, "is no function")

    def verify(text: str, row: Row) -> float:
        reward = called(text, row)
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

    def episode(self, prompt: int) -> "_Question":
        row = self._row(prompt)
        if self.verifier == "exact":
            cell(row, self.answer, self.data)
        verifier = load_verifier(self.verifier, self.answer)
        return _Question(self.observation(row), row, verifier)

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
        found = cell(row, column, self.data)
        return _messages(found, column)[-1]["content"] if isinstance(found, list) else str(found)


def _messages(value: object, column: str) -> list[dict[str, str]]:
    if isinstance(value, list) and value:
        read = [
            {"role": str(item.get("role")), "content": str(item.get("content", ""))}
            for item in value
            if isinstance(item, dict)
        ]
        if len(read) == len(value):
            return read
    fix = "must be text or a list of messages with role and content"
    raise ConfigError.of(f"column {column}", str(value)[:50], fix)


@dataclass(frozen=True, slots=True)
class _Question:
    first_observation: Observation
    row: Row
    verifier: Verifier

    def answer(self, text: str) -> EnvironmentReply:
        return EnvironmentReply("", self.verifier(text, self.row), True)
