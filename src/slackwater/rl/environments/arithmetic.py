"""Tasks of one turn whose answers are digits: sums, copies and counting on."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slackwater.rl.environments.episode import EnvironmentReply, check_at_least


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
        answer = text.strip()
        if answer == self.expected:
            return EnvironmentReply("", 1.0, True)
        reward = 0.5 * digit_share(answer, self.expected) if self.partial else 0.0
        return EnvironmentReply("", reward, True)


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
    def episode(self, prompt: int) -> "_Copy | _Count": ...

    def demonstration(self, prompt: int) -> tuple[tuple[str, str], ...]:
        """Random digits of the right number: the format without the solution."""
        digits = random_digits([self.seed, prompt, 1], self.digits)
        return ((self.episode(prompt).first_observation, digits),)


@dataclass(frozen=True, slots=True)
class CopyDigits(_DigitTask):
    """`407=` has the answer `407`; the reward is the share of right digits."""

    kind: Literal["copy-digits"] = "copy-digits"

    def episode(self, prompt: int) -> "_Copy":
        return _Copy(random_digits([self.seed, prompt], self.digits))


@dataclass(frozen=True, slots=True)
class _Copy:
    expected: str

    @property
    def first_observation(self) -> str:
        return f"{self.expected}="

    def answer(self, text: str) -> EnvironmentReply:
        return EnvironmentReply("", digit_share(text, self.expected), True)


def random_digits(seed: list[int], number: int) -> str:
    return "".join(str(digit) for digit in np.random.default_rng(seed).integers(0, 10, number))


@dataclass(frozen=True, slots=True)
class CountingTask(_DigitTask):
    """`7=` continues `890123...` (`step` -1: `654321...`); the reward is the right steps' share."""

    kind: Literal["count-on"] = "count-on"
    digits: int = 32
    step: int = 1

    def episode(self, prompt: int) -> "_Count":
        first = np.random.default_rng([self.seed, prompt]).integers(0, 10)
        return _Count(int(first), self.digits, self.step)


@dataclass(frozen=True, slots=True)
class _Count:
    first: int
    digits: int
    step: int

    @property
    def first_observation(self) -> str:
        return f"{self.first}="

    def answer(self, text: str) -> EnvironmentReply:
        after = {str(digit): str((digit + self.step) % 10) for digit in range(10)}
        before = f"{self.first}{text}"
        right = sum(
            after.get(digit) == next_digit
            for digit, next_digit in zip(before, text[: self.digits], strict=False)
        )
        return EnvironmentReply("", right / max(len(text), self.digits), True)
