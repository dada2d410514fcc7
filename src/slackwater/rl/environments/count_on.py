"""Count on from a digit; one turn. A task with answers of any length that is learnt soon."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from slackwater.rl.environments.copy_digits import drawn_digits
from slackwater.rl.environments.episode import EnvironmentReply, at_least


@dataclass(frozen=True, slots=True)
class CountingTask:
    """`7=` wants `890123...` (`step` -1: `654321...`); the reward is the share of correct steps."""

    kind: Literal["count-on"] = "count-on"
    prompts: int = 4000
    digits: int = 32
    step: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("environment.prompts", self.prompts, 1)
        at_least("environment.digits", self.digits, 1)

    def episode(self, prompt: int) -> "_Count":
        first = np.random.default_rng([self.seed, prompt]).integers(0, 10)
        return _Count(int(first), self.digits, self.step)

    def demonstration(self, prompt: int) -> tuple[tuple[str, str], ...]:
        """As many digits as are wanted, but any: the form without the task."""
        return (
            (
                self.episode(prompt).first_observation,
                drawn_digits([self.seed, prompt, 1], self.digits),
            ),
        )


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
            after.get(one) == next_one
            for one, next_one in zip(before, text[: self.digits], strict=False)
        )
        return EnvironmentReply("", right / max(len(text), self.digits), True)
