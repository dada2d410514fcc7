"""The inputs of a decode step on the device, as one buffer of 32-bit words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.cuda.adapter_rows import (
    DECODE_TILE,
    ROW_FIELDS,
    TILE_FIELDS,
    AdapterSlot,
    most_tiles,
    row_columns,
    tile_columns,
)
from slackwater.engine.executor import RowBatch, SamplingColumns

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)

SlotSpans = Sequence[tuple[int, int, AdapterSlot]]


@dataclass(slots=True)
class QueuedStep:
    """A step on the device: its inputs, its `answer` there, and the number of the host's `buffer`.
    `tokens` are its rows' input tokens, once the previous step's answer has been read.
    """

    model: object
    batch: RowBatch
    columns: SamplingColumns
    spans: SlotSpans
    lines: NDArray[np.int32]
    logits: Tensor
    answer: Tensor
    buffer: int
    block_tokens: int
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def rows_of(
        self,
        model: object,
        batch: RowBatch,
        tables: NDArray[np.int32],
        columns: SamplingColumns,
        spans: SlotSpans,
    ) -> NDArray[np.int64] | None:
        """Which of its rows answer the request, or None if this step computed something else."""
        if model is not self.model:
            return None
        own = self.batch.slots
        rows = np.arange(len(own))
        if not np.array_equal(own, batch.slots):
            order = np.argsort(own)
            rows = order[np.searchsorted(own, batch.slots, sorter=order).clip(max=len(own) - 1)]
        same = (
            np.array_equal(own[rows], batch.slots)
            and np.array_equal(self.batch.positions[rows], batch.positions)
            and np.array_equal(self.tokens[rows], batch.tokens)
            and np.array_equal(self.columns.temperature[rows], columns.temperature)
            and np.array_equal(self.columns.uniform[rows], columns.uniform)
            and self._same_blocks(rows, batch, tables)
            and not ((columns.top_k > 0) | (columns.top_p < 1)).any()
        )
        if not same or not self._same_adapters(rows, spans, len(batch.tokens)):
            return None
        return rows

    def _same_blocks(
        self, rows: NDArray[np.int64], batch: RowBatch, tables: NDArray[np.int32]
    ) -> bool:
        """Whether the rows read the same blocks; more may have been allocated since."""
        columns = np.arange(self.lines.shape[1])
        unread = columns > (batch.positions // self.block_tokens)[:, None]
        same = self.lines[rows] == tables[batch.slots, : len(columns)]
        return bool((same | unread).all())

    def _same_adapters(self, rows: NDArray[np.int64], spans: SlotSpans, count: int) -> bool:
        if not self.spans and not spans:
            return True
        if len(rows) == len(self.batch.slots) and self.spans == spans:
            return True
        mine = row_columns(len(self.batch.slots), self.spans)[rows]
        return np.array_equal(mine, row_columns(count, spans))


def graph_rows(rows: int) -> int:
    """The captured size that `rows` are padded to."""
    return next((size for size in _SIZES if size >= rows), -(-rows // 32) * 32)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for: rows, spans of the longest context, units of adapters (or 0).

    The step's inputs are in one buffer of 32-bit words, column after column, block tables last.
    """

    rows: int
    spans: int
    extent: int
    table_width: int

    @property
    def tiles(self) -> int:
        return most_tiles(self.rows, self.extent) if self.extent else 0

    def fill(
        self,
        buffer: NDArray[np.int32],
        batch: RowBatch,
        tables: NDArray[np.int32],
        sampling: SamplingColumns,
    ) -> int:
        """Write a step's inputs, padded with token 0 of the scratch block; the words used."""
        count, rows, places = len(batch.tokens), self.rows, input_columns(self)
        numbers = buffer[: 4 * rows].reshape(4, rows)
        numbers[0, :count], numbers[1, :count] = batch.tokens, batch.positions
        drawn = numbers[2:].view(np.float32)
        drawn[0, :count], drawn[1, :count] = sampling.temperature, sampling.uniform
        start, stop = places["tables"]
        lines = buffer[start:stop].reshape(rows, self.table_width)
        lines[:count] = tables[batch.slots, : self.table_width]
        if count < rows:
            numbers[:2, count:] = 0
            drawn[0, count:], drawn[1, count:] = 1.0, 0.5
            lines[count:, 0] = 0
        return stop

    def fill_adapters(self, buffer: NDArray[np.int32], spans: SlotSpans) -> None:
        """Write which rows use which adapter; the same until the batch changes."""
        places = input_columns(self)
        start, stop = places["adapted"]
        buffer[start:stop].reshape(-1, ROW_FIELDS)[:] = row_columns(self.rows, spans)
        start, stop = places["tiles"]
        target = buffer[start:stop].reshape(-1, TILE_FIELDS)
        tiles = tile_columns(self.rows, spans, DECODE_TILE)
        target[: len(tiles)], target[len(tiles) :] = tiles, 0


@lru_cache(maxsize=1024)
def input_columns(shape: StepShape) -> Mapping[str, tuple[int, int]]:
    """Where each column of a step's inputs begins and ends."""
    sizes = {
        "tokens": shape.rows,
        "positions": shape.rows,
        "temperature": shape.rows,
        "uniform": shape.rows,
        "adapted": shape.rows * ROW_FIELDS if shape.extent else 0,
        "tiles": shape.tiles * TILE_FIELDS,
        "tables": shape.rows * shape.table_width,
    }
    places, start = {}, 0
    for name, size in sizes.items():
        places[name] = (start, start + size)
        start += size
    return places
