"""What a decode step needs on the device, as one buffer of 32-bit words."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slackwater.engine.cuda.adapter_rows import (
    DECODE_TILE,
    ROW_FIELDS,
    TILE_FIELDS,
    Held,
    most_tiles,
    row_columns,
    tile_columns,
)
from slackwater.engine.executor import RowBatch, SamplingColumns

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)


def graph_rows(rows: int) -> int:
    """The captured size that `rows` are padded to."""
    return next((size for size in _SIZES if size >= rows), -(-rows // 32) * 32)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for: rows, cuts of the longest context, units of adapters (0: none).

    The step's numbers lie in one buffer of 32-bit words, one column after the other, block tables last.
    """

    rows: int
    spans: int
    extent: int
    table_width: int

    @property
    def tiles(self) -> int:
        return most_tiles(self.rows, self.extent) if self.extent else 0

    def columns(self) -> dict[str, tuple[int, int]]:
        """Where each column begins and ends."""
        adapted = self.rows if self.extent else 0
        sizes = {
            "tokens": self.rows,
            "positions": self.rows,
            "temperature": self.rows,
            "uniform": self.rows,
            "adapted": adapted * ROW_FIELDS,
            "tiles": self.tiles * TILE_FIELDS,
            "tables": self.rows * self.table_width,
        }
        places, start = {}, 0
        for name, size in sizes.items():
            places[name] = (start, start + size)
            start += size
        return places

    def fill(
        self,
        buffer: NDArray[np.int32],
        batch: RowBatch,
        tables: NDArray[np.int32],
        sampling: SamplingColumns,
        spans: Sequence[tuple[int, int, Held]],
    ) -> int:
        """Write a step's numbers; rows beyond the batch are token 0 at position 0 of the scratch block. Words used."""
        count, places = len(batch.tokens), self.columns()
        column = {name: buffer[start:stop] for name, (start, stop) in places.items()}
        for name, values in (("tokens", batch.tokens), ("positions", batch.positions)):
            column[name][:count] = values
            column[name][count:] = 0
        heat, uniform = (column[name].view(np.float32) for name in ("temperature", "uniform"))
        heat[:count], uniform[:count] = sampling.temperature, sampling.uniform
        heat[count:], uniform[count:] = 1.0, 0.5
        lines = column["tables"].reshape(self.rows, self.table_width)
        lines[:count] = tables[batch.slots, : self.table_width]
        lines[count:, 0] = 0
        if self.extent:
            column["adapted"].reshape(-1, ROW_FIELDS)[:] = row_columns(self.rows, spans)
            tiles = tile_columns(self.rows, spans, DECODE_TILE)
            target = column["tiles"].reshape(-1, TILE_FIELDS)
            target[: len(tiles)], target[len(tiles) :] = tiles, 0
        return places["tables"][1]
