"""The order of prompts: each once per epoch, shuffled by the seed.

The whole state is the number of prompts used, which a checkpoint stores.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PromptUse:
    """One use of one prompt."""

    epoch: int
    prompt: int


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """A fresh permutation of `prompts` prompts for every epoch."""

    prompts: int
    seed: int

    def uses(self, start: int, count: int) -> tuple[PromptUse, ...]:
        """The uses number `start` to `start + count - 1`."""
        found: list[PromptUse] = []
        while len(found) < count:
            epoch, place = divmod(start + len(found), self.prompts)
            order = np.random.default_rng([self.seed, epoch]).permutation(self.prompts)
            taken = order[place : place + count - len(found)]
            found.extend(PromptUse(epoch, int(prompt)) for prompt in taken)
        return tuple(found)
