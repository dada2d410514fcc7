"""A decode step that was queued before the tokens of the one before it were seen on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.cuda.adapter_rows import AdapterSlot, row_columns
from slackwater.engine.executor import RowBatch, SamplingColumns

HeldSpans = Sequence[tuple[int, int, AdapterSlot]]


@dataclass(slots=True)
class QueuedStep:
    """What a step on the device was told, and where its answer will be: `answer` there, `buffer` of
    the host's two.

    `tokens` are those that its rows began with, once they are known.
    """

    model: object
    batch: RowBatch
    columns: SamplingColumns
    spans: HeldSpans
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
        spans: HeldSpans,
    ) -> NDArray[np.int64] | None:
        """Which of its rows are the wanted ones, if all are here exactly as wanted."""
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
        """Whether the rows look at the same blocks; more may have been held since."""
        columns = np.arange(self.lines.shape[1])
        unread = columns > (batch.positions // self.block_tokens)[:, None]
        same = self.lines[rows] == tables[batch.slots, : len(columns)]
        return bool((same | unread).all())

    def _same_adapters(self, rows: NDArray[np.int64], spans: HeldSpans, count: int) -> bool:
        if not self.spans and not spans:
            return True
        if len(rows) == len(self.batch.slots) and self.spans == spans:
            return True
        mine = row_columns(len(self.batch.slots), self.spans)[rows]
        return np.array_equal(mine, row_columns(count, spans))
