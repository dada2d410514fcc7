"""Sums of two numbers; one turn."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from slackwater.rl.environments.episode import EnvironmentReply, at_least


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`17+5=` wants `22`; with `partial` a wrong sum earns up to half, by correct digits."""

    kind: Literal["arithmetic"] = "arithmetic"
    prompts: int = 2000
    max_operand: int = 9
    partial: bool = True
    instruction: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("environment.prompts", self.prompts, 1)
        at_least("environment.max_operand", self.max_operand, 1)

    def episode(self, prompt: int) -> "_Sum":
        first, second = np.random.default_rng([self.seed, prompt]).integers(
            0, self.max_operand + 1, 2
        )
        question = f"{self.instruction}{first}+{second}="
        return _Sum(question, str(first + second), self.partial)

    def demonstration(self, prompt: int) -> tuple[tuple[str, str], ...]:
        task = self.episode(prompt)
        return ((task.first_observation, task.expected),)


@dataclass(frozen=True, slots=True)
class _Sum:
    first_observation: str
    expected: str
    partial: bool

    def answer(self, text: str) -> EnvironmentReply:
        given = text.strip()
        if given == self.expected:
            return EnvironmentReply("", 1.0, True)
        reward = 0.5 * digit_share(given, self.expected) if self.partial else 0.0
        return EnvironmentReply("", reward, True)


def digit_share(given: str, expected: str) -> float:
    """The share of places where the two agree, of the longer one's."""
    same = sum(a == b for a, b in zip(given, expected, strict=False))
    return same / max(len(given), len(expected), 1)
