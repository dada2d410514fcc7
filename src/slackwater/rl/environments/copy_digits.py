"""Repeat the digits; one turn. The smallest task that a model from nothing can be seen to learn."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from slackwater.rl.environments.arithmetic import digit_share
from slackwater.rl.environments.episode import EnvironmentReply, at_least


@dataclass(frozen=True, slots=True)
class CopyDigits:
    """`407=` wants `407`; the reward is the share of places that are right."""

    kind: Literal["copy-digits"] = "copy-digits"
    prompts: int = 4000
    digits: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("environment.prompts", self.prompts, 1)
        at_least("environment.digits", self.digits, 1)

    def episode(self, prompt: int) -> "_Copy":
        return _Copy(drawn_digits([self.seed, prompt], self.digits))

    def demonstration(self, prompt: int) -> tuple[tuple[str, str], ...]:
        """As many digits as are wanted, but any: the form without the task."""
        return (
            (
                self.episode(prompt).first_observation,
                drawn_digits([self.seed, prompt, 1], self.digits),
            ),
        )


@dataclass(frozen=True, slots=True)
class _Copy:
    expected: str

    @property
    def first_observation(self) -> str:
        return f"{self.expected}="

    def answer(self, text: str) -> EnvironmentReply:
        return EnvironmentReply("", digit_share(text, self.expected), True)


def drawn_digits(seed: list[int], number: int) -> str:
    """Digits determined by a seed."""
    return "".join(str(digit) for digit in np.random.default_rng(seed).integers(0, 10, number))
