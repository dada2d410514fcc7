"""The port to grammars: an engine that has none refuses requests that bring one."""

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slackwater.model.sampling import Grammar


class Guide(Protocol):
    """Says which tokens may come next in one generation.

    `stopped`: the answer is complete and nothing can follow. `failed`: it cannot be followed any
    more, and why.
    """

    stopped: bool
    failed: str | None

    def allow(self, bits: NDArray[np.int32]) -> None:
        """Fill a row of bits, one per token of the vocabulary, lowest bit first."""
        ...

    def advance(self, token: int) -> None:
        """Take note of the token that was drawn."""
        ...


class Guides(Protocol):
    """Where guides come from."""

    def guide(self, grammar: Grammar, generated: Sequence[int], ends: Collection[int]) -> Guide:
        """A guide that stands after `generated`; ConfigError if the grammar cannot be followed."""
        ...
