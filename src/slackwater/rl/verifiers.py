"""Verifiers: a response and its row of data to a reward."""

import importlib
import math
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from slackwater.model.errors import ConfigError
from slackwater.rl.data_files import Row

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
