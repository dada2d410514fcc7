"""Rows of a packed batch, where neighbours that begin alike share the rows of what they have in
common.

In a causal net a position's state depends on what is before it only, so the samples of one prompt
need the prompt once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedRows:
    """`rows[i][p]` is the row of position p of sequence i; its own rows begin at position
    `own_from[i]`.
    """

    tokens: Ints
    positions: Ints
    rows: tuple[Ints, ...]
    own_from: tuple[int, ...]

    @property
    def count(self) -> int:
        return int(self.tokens.shape[0])


def share_prefixes(sequences: Sequence[Ints]) -> SharedRows:
    """One row per token, but for the prefix that a sequence has in common with the one
    before it.
    """
    rows: list[Ints] = []
    own_from: list[int] = []
    count = 0
    for sequence, common in zip(sequences, common_with_previous(sequences), strict=True):
        own = np.arange(count, count + len(sequence) - common)
        rows.append(np.concatenate([rows[-1][:common], own]) if common else own)
        own_from.append(common)
        count += len(own)
    parts = list(zip(sequences, own_from, strict=True))
    return SharedRows(
        tokens=np.concatenate([sequence[start:] for sequence, start in parts]),
        positions=np.concatenate([np.arange(start, len(sequence)) for sequence, start in parts]),
        rows=tuple(rows),
        own_from=tuple(own_from),
    )


def common_with_previous(sequences: Sequence[Ints]) -> list[int]:
    """How many tokens each sequence begins with that the one before it begins with too."""
    return [
        _common(sequences[number - 1], sequence) if number else 0
        for number, sequence in enumerate(sequences)
    ]


def _common(one: Ints, other: Ints) -> int:
    shorter = min(len(one), len(other))
    differing = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differing[0]) if len(differing) else shorter
