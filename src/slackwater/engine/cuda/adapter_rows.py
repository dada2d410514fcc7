"""Which rows of a step use which adapter, in the kernels' format, and where adapters are stored.

An adapter of rank 24 takes two adjacent units of 16, at the lowest position that fits: a batch
reads all units up to its highest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

DECODE_TILE = 16  # rows of one tile where every row decodes
PROMPT_TILE = 64
TILE_FIELDS = 5
ROW_FIELDS = 3
_EXTENTS = (2, 4, 16, 32)  # units; above that, multiples of the last

UNIT = 16  # ranks


def units_of(rank: int) -> int:
    return -(-rank // UNIT)


class RankPool:
    """Allocator of adjacent units."""

    def __init__(self) -> None:
        self._taken: list[bool] = []

    @property
    def units(self) -> int:
        return len(self._taken)

    def take(self, count: int) -> int | None:
        """Allocate `count` adjacent free units; the first one, or None if there are none."""
        run = 0
        for place, taken in enumerate(self._taken):
            run = 0 if taken else run + 1
            if run == count:
                first = place + 1 - count
                self._taken[first : place + 1] = [True] * count
                return first
        return None

    def give_back(self, first: int, count: int) -> None:
        assert all(self._taken[first : first + count]), "units are given back once"
        self._taken[first : first + count] = [False] * count

    def grow(self, units: int) -> None:
        self._taken += [False] * (units - len(self._taken))

    def next_size(self, count: int) -> int:
        """The size to grow to for `count` adjacent free units: at least double, a multiple of 4."""
        free_at_end = 0
        while free_at_end < self.units and not self._taken[-1 - free_at_end]:
            free_at_end += 1
        least = max(2 * self.units, self.units - free_at_end + count) if self.units else 4 * count
        return -(-least // 4) * 4


@dataclass(frozen=True, slots=True)
class AdapterSlot:
    """Where an adapter is stored in the stacks, and the scale of its updates."""

    first: int
    units: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """On the device: `tiles [T, 5]`, and `rows [N, 3]` for kernels that work row by row. `extent`
    is how many units the products compute. `fused`: kernels after a product add the updates.
    """

    extent: int
    tiles: Tensor
    rows: Tensor
    fused: bool


def extent_of(units: int) -> int:
    """The captured number of units that `units` are rounded up to."""
    return next((size for size in _EXTENTS if size >= units), -(-units // 32) * 32)


def most_tiles(rows: int, extent: int) -> int:
    """A bound on a decode step's tiles; an adapter takes at least one unit."""
    return min(rows, -(-rows // DECODE_TILE) + extent + 1)


def row_columns(rows: int, spans: Sequence[tuple[int, int, AdapterSlot]]) -> NDArray[np.int32]:
    """`[rows, 3]`: first unit, units, scale's bits; zero where a row has no adapter."""
    columns = np.zeros((rows, ROW_FIELDS), np.int32)
    for start, stop, held in spans:
        columns[start:stop] = (held.first, held.units, _bits(held.scale))
    return columns


def tile_columns(
    rows: int, spans: Sequence[tuple[int, int, AdapterSlot]], most: int
) -> NDArray[np.int32]:
    """`[T, 5]`: first row, rows, first unit, units, scale's bits; a row is in one tile."""
    tiles: list[tuple[int, int, int, int, int]] = []
    at = 0
    for start, stop, held in [*spans, (rows, rows, AdapterSlot(0, 0, 0.0))]:
        tiles += [(first, min(most, start - first), 0, 0, 0) for first in range(at, start, most)]
        fields = (held.first, held.units, _bits(held.scale))
        tiles += [(first, min(most, stop - first), *fields) for first in range(start, stop, most)]
        at = stop
    return np.array(tiles, np.int32).reshape(-1, TILE_FIELDS)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
