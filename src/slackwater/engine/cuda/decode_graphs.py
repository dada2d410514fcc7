"""Decode steps as captured CUDA graphs: one launch instead of some 400, sampling included."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.cuda.adapter_rows import ROW_FIELDS, TILE_FIELDS, AdapterRows, extent_of
from slackwater.engine.cuda.attention import (
    BLOCK_TOKENS,
    CudaPagedAttention,
    CudaPagedRows,
    span_tokens,
)
from slackwater.engine.cuda.forward_pass import CudaForwardPass
from slackwater.engine.cuda.sampling import launch_sampling
from slackwater.engine.cuda.step_shape import (
    QueuedStep,
    SlotSpans,
    StepShape,
    graph_rows,
    input_columns,
)
from slackwater.engine.executor import RowBatch, Sampled, SamplingColumns

_WARM_UPS = 2
_FEW_ROWS = 64


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    answer: Tensor


class _HostBuffer:
    """A step's inputs and answer, pinned on the host, with the events of their copies."""

    def __init__(self, words: int, rows: int) -> None:
        self.numbers = torch.zeros(words, dtype=torch.int32, pin_memory=True)
        self.view = self.numbers.numpy()
        self.answer = torch.zeros(2 * rows, dtype=torch.int32, pin_memory=True)
        new_event: Any = torch.cuda.Event
        self.inputs_copied, self.answer_copied = new_event(), new_event()
        self.adapters_of: tuple[StepShape, SlotSpans] | None = None


class DecodeGraphs:
    """Graphs by model and shape, captured at first use.

    New weights or adapters need no new graph: graphs read memory that is written in place. Two
    steps may be queued at once, each with its own host buffer.
    """

    def __init__(
        self,
        cache: Tensor,
        block_elements: int,
        kv_heads: int,
        rows: int,
        table_width: int,
        *,
        fixed_spans: bool,
    ) -> None:
        self._cache, self._block_elements, self._kv_heads = cache, block_elements, kv_heads
        rows = graph_rows(rows)
        self._table_width, self._fixed_spans = table_width, fixed_spans
        words = input_columns(StepShape(rows, 1, 1 << 10, table_width))["tables"][1]
        self._buffers = [_HostBuffer(words, rows) for _ in range(2)]
        self._turn = 0
        self._inputs = torch.zeros(words, dtype=torch.int32, device=cache.device)
        self._slots = torch.arange(rows, dtype=torch.int32, device=cache.device)
        self._captured: dict[tuple[int, StepShape], _CapturedGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def launch(
        self,
        model: CudaForwardPass,
        batch: RowBatch,
        tables: NDArray[np.int32],
        sampling: SamplingColumns,
        spans: SlotSpans,
        tokens: Tensor | None = None,
    ) -> QueuedStep:
        """Queue a step, with the batch's tokens or with `tokens` that are on the device already."""
        rows = graph_rows(len(batch.tokens))
        span = span_tokens(rows * self._kv_heads, fixed=self._fixed_spans)
        cuts = triton.next_power_of_2(-(-(int(batch.positions.max()) + 1) // span))
        width = min(self._table_width, cuts * (span // BLOCK_TOKENS), tables.shape[1])
        units = max((held.first + held.units for _, _, held in spans), default=0)
        extent = min(extent_of(units), model.units) if units else 0
        shape = StepShape(rows, cuts, extent, width)
        self._turn ^= 1
        buffer = self._buffers[self._turn]
        buffer.inputs_copied.synchronize()  # its previous inputs must have been read
        words = shape.fill(buffer.view, batch, tables, sampling)
        if extent and (shape, spans) != buffer.adapters_of:
            shape.fill_adapters(buffer.view, spans)
        buffer.adapters_of = (shape, spans)
        self._inputs[:words].copy_(buffer.numbers[:words], non_blocking=True)
        buffer.inputs_copied.record()
        if tokens is not None:
            self._inputs[: len(tokens)].copy_(tokens)
        key = (id(model), shape)
        if key not in self._captured:
            with _products_for(shape.rows):
                self._captured[key] = self._capture(model, shape)
        captured = self._captured[key]
        captured.graph.replay()
        lines = tables[batch.slots, :width]
        return QueuedStep(
            model,
            batch,
            sampling,
            spans,
            lines,
            captured.logits,
            captured.answer,
            self._turn,
            BLOCK_TOKENS,
        )

    def send(self, step: QueuedStep) -> None:
        """Queue the copy of the answer to the host."""
        buffer = self._buffers[step.buffer]
        host = buffer.answer[: step.answer.numel()]
        host.copy_(step.answer.view(-1), non_blocking=True)
        buffer.answer_copied.record()

    def fetch(self, step: QueuedStep) -> Sampled:
        """Wait for a step's answer: the tokens and log-probs of its rows."""
        buffer = self._buffers[step.buffer]
        buffer.answer_copied.synchronize()
        both = buffer.answer[: step.answer.numel()].numpy().reshape(2, -1)
        both = both[:, : len(step.batch.tokens)]
        return both[0].astype(np.int64), both[1].view(np.float32).copy()

    def forget(self, model: CudaForwardPass) -> None:
        """Drop a model's graphs: its weights have moved."""
        torch.cuda.synchronize()
        self._captured = {key: kept for key, kept in self._captured.items() if key[0] != id(model)}
        self._pool = torch.cuda.graph_pool_handle()  # the old one ends with its last graph

    def close(self) -> None:
        """Drop every graph, and the reference to the cache that they read."""
        self._captured.clear()
        self._cache = torch.empty(0, device=self._cache.device)

    def _forward(self, model: CudaForwardPass, shape: StepShape) -> tuple[Tensor, Tensor]:
        places = input_columns(shape)
        column = {name: self._inputs[start:stop] for name, (start, stop) in places.items()}
        tables = column["tables"].view(shape.rows, shape.table_width)
        where = CudaPagedRows(
            tables,
            self._slots[: shape.rows],
            column["positions"],
            span_tokens(shape.rows * self._kv_heads, fixed=self._fixed_spans),
            shape.spans,
            None,
        )
        attention = CudaPagedAttention(self._cache, self._block_elements, self._kv_heads, where)
        adapters = None
        if shape.extent:
            tiles = column["tiles"].view(-1, TILE_FIELDS)
            rows = column["adapted"].view(-1, ROW_FIELDS)
            adapters = AdapterRows(shape.extent, tiles, rows, fused=True)
        logits = model.logits(model.run_layers(column["tokens"], attention, adapters), adapters)
        answer = torch.empty(2, shape.rows, dtype=torch.int32, device=logits.device)
        heat, uniform = (column[name].view(torch.float32) for name in ("temperature", "uniform"))
        launch_sampling(logits, heat, uniform, answer)
        return logits, answer

    def _capture(self, model: CudaForwardPass, shape: StepShape) -> _CapturedGraph:
        new_stream: Any = torch.cuda.Stream
        side = new_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._forward(model, shape)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy weights meanwhile; only this thread's calls must be capturable.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits, answer = self._forward(model, shape)
        return _CapturedGraph(graph, logits, answer)


@contextmanager
def _products_for(rows: int) -> Iterator[None]:
    """Use the product library that was measured to be faster for so many rows."""
    choose: Any = torch.backends.cuda.preferred_blas_library
    before = choose()
    choose("cublaslt" if rows <= _FEW_ROWS else "cublas")
    try:
        yield
    finally:
        choose(before)
