"""Tasks of one turn whose answers are digits: sums, copies and counting on."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slackwater.rl.environments.episode import Question, check_at_least


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`17+5=` has the answer `22`; with `partial` a wrong sum earns up to half, by right digits."""

    kind: Literal["arithmetic"] = "arithmetic"
    prompts: int = 2000
    max_operand: int = 9
    partial: bool = True
    instruction: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least("environment.prompts", self.prompts, 1)
        check_at_least("environment.max_operand", self.max_operand, 1)

    def episode(self, prompt: int) -> Question[str]:
        question, expected = self._task(prompt)
        return Question(question, lambda text: self._score(text.strip(), expected))

    def demonstration(self, prompt: int) -> tuple[tuple[str, str], ...]:
        return (self._task(prompt),)

    def _task(self, prompt: int) -> tuple[str, str]:
        """A question and its answer."""
        first, second = np.random.default_rng([self.seed, prompt]).integers(
            0, self.max_operand + 1, 2
        )
        return f"{self.instruction}{first}+{second}=", str(first + second)

    def _score(self, answer: str, expected: str) -> float:
        if answer == expected:
            return 1.0
        return 0.5 * digit_share(answer, expected) if self.partial else 0.0


def digit_share(answer: str, expected: str) -> float:
    """The share of equal digits, relative to the longer text."""
    same = sum(a == b for a, b in zip(answer, expected, strict=False))
    return same / max(len(answer), len(expected), 1)


@dataclass(frozen=True, slots=True)
class _DigitTask(ABC):
    prompts: int = 4000
    digits: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least("environment.prompts", self.prompts, 1)
        check_at_least("environment.digits", self.digits, 1)

    @abstractmethod
    def episode(self, prompt: int) -> Question[str]: ...

    def demonstration(self, prompt: int) -> tuple[tuple[str, str], ...]:
        """Random digits of the right number: the format without the solution."""
        digits = random_digits([self.seed, prompt, 1], self.digits)
        return ((self.episode(prompt).first_observation, digits),)


@dataclass(frozen=True, slots=True)
class CopyDigits(_DigitTask):
    """`407=` has the answer `407`; the reward is the share of right digits."""

    kind: Literal["copy-digits"] = "copy-digits"

    def episode(self, prompt: int) -> Question[str]:
        expected = random_digits([self.seed, prompt], self.digits)
        return Question(f"{expected}=", lambda text: digit_share(text, expected))


def random_digits(seed: list[int], number: int) -> str:
    return "".join(str(digit) for digit in np.random.default_rng(seed).integers(0, 10, number))


@dataclass(frozen=True, slots=True)
class CountingTask(_DigitTask):
    """`7=` continues `890123...` (`step` -1: `654321...`); the reward is the right steps' share."""

    kind: Literal["count-on"] = "count-on"
    digits: int = 32
    step: int = 1

    def episode(self, prompt: int) -> Question[str]:
        first = np.random.default_rng([self.seed, prompt]).integers(0, 10)
        return Question(f"{first}=", lambda text: self._score(f"{first}{text}", text))

    def _score(self, before: str, text: str) -> float:
        """The share of digits that follow the one before."""
        after = {str(digit): str((digit + self.step) % 10) for digit in range(10)}
        steps = zip(before, text[: self.digits], strict=False)
        right = sum(after.get(digit) == next_digit for digit, next_digit in steps)
        return right / max(len(text), self.digits)
