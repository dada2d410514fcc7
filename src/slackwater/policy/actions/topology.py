"""What is left of a resource after an action takes some of it: the operators of ARL-Tangram's
Appendix B.

In a topology's table, `after[state, units]` is the next state, or -1 if the units are not
available. Plain units are interchangeable. A chunk is a block of 2^a neighbours whose first number
is a multiple of 2^a, like GPUs of one parallel layout (buddy allocation).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from slackwater.policy.compiled import jit_compile

LEVELS = 4  # chunks of 1, 2, 4 and 8
WHOLE = 1 << (LEVELS - 1)


@dataclass(frozen=True, slots=True)
class Topology:
    """A table of state transitions and the present state. `plain`: units are interchangeable."""

    after: NDArray[np.int64]
    start: int
    plain: bool


@cache
def _unit_moves(states: int, most: int) -> NDArray[np.int64]:
    left = np.arange(states)[:, None] - np.arange(most + 1)[None, :]
    return np.where(left < 0, -1, left)


def make_unit_topology(free: int, most: int) -> Topology:
    """A topology with `free` interchangeable units; one action takes at most `most` of them."""
    states = 1 << max(free, 1).bit_length()  # rounded up, so that few tables are cached
    return Topology(_unit_moves(states, most), free, plain=True)


@jit_compile
def _chunk_moves(limits: NDArray[np.int64]) -> NDArray[np.int64]:
    """The transitions between counts of free chunks by level. A state is the counts as a
    mixed-radix number.
    """
    levels = len(limits)
    states = 1
    for level in range(levels):
        states *= limits[level] + 1
    whole = 1 << (levels - 1)
    after = np.full((states, whole + 1), -1, dtype=np.int64)
    counts = np.zeros(levels, dtype=np.int64)
    for state in range(states):
        after[state, 0] = state
        rest = state
        for level in range(levels):
            counts[level] = rest % (limits[level] + 1)
            rest //= limits[level] + 1
        for level in range(levels):
            split = level
            while split < levels and counts[split] == 0:
                split += 1
            if split == levels:
                continue
            # Halve the smallest chunk that is large enough until it fits. One half of each size
            # stays free.
            target, radix = 0, 1
            for each in range(levels):
                left = counts[each]
                if each == split:
                    left -= 1
                elif level <= each < split:
                    left += 1
                target += left * radix
                radix *= limits[each] + 1
            after[state, 1 << level] = target
    return after


@lru_cache(maxsize=4096)
def _chunk_table(limits: tuple[int, ...]) -> NDArray[np.int64]:
    return _chunk_moves(np.array(limits, dtype=np.int64))


def make_chunk_topology(free: Sequence[int]) -> Topology:
    """A topology with `free[a]` chunks of 2^a units that are not part of a larger free chunk."""
    limits = tuple(max(count, 1) for count in free)
    state, radix = 0, 1
    for count, limit in zip(free, limits, strict=True):
        state += count * radix
        radix *= limit + 1
    return Topology(_chunk_table(limits), state, plain=False)
