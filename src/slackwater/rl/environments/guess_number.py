"""Find a number from the answers `higher` and `lower`; many turns."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from slackwater.rl.environments.episode import EnvironmentReply, check_at_least, play_blindly


@dataclass(frozen=True, slots=True)
class GuessNumber:
    """A secret from 1 to `highest`; found in turn t of `max_turns` earns 1 - (t - 1) / max_turns.

    A first guess in range earns `valid_reward`, which gives a signal before the first success.
    """

    kind: Literal["guess-number"] = "guess-number"
    prompts: int = 2000
    highest: int = 8
    max_turns: int = 4
    valid_reward: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least("environment.prompts", self.prompts, 1)
        check_at_least("environment.highest", self.highest, 2)
        check_at_least("environment.max_turns", self.max_turns, 1)

    def episode(self, prompt: int) -> "_Guessing":
        secret = np.random.default_rng([self.seed, prompt]).integers(1, self.highest + 1)
        return _Guessing(self, int(secret))

    def demonstration(self, prompt: int) -> tuple[tuple[str, str], ...]:
        """Random guesses in range."""
        guesses = np.random.default_rng([self.seed, prompt, 1])
        return play_blindly(
            self.episode(prompt), lambda: str(guesses.integers(1, self.highest + 1))
        )


class _Guessing:
    def __init__(self, rules: GuessNumber, secret: int) -> None:
        self._rules = rules
        self._secret = secret
        self._turn = 0
        self.first_observation = f"1-{rules.highest}?"

    def answer(self, text: str) -> EnvironmentReply:
        rules, guess = self._rules, text.strip()
        self._turn += 1
        is_valid = guess.isascii() and guess.isdigit() and 1 <= int(guess) <= rules.highest
        reward = rules.valid_reward if is_valid and self._turn == 1 else 0.0
        if is_valid and int(guess) == self._secret:
            return EnvironmentReply("", reward + 1 - (self._turn - 1) / rules.max_turns, True)
        if not is_valid or self._turn == rules.max_turns:
            return EnvironmentReply("", reward, True)
        return EnvironmentReply("higher?" if int(guess) < self._secret else "lower?", reward, False)
