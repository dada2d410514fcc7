"""The CUDA executor: the cache in device pages, decode steps as graphs, the rest eager."""

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.config import EngineConfig
from slackwater.engine.cuda.adapter_rows import (
    PROMPT_TILE,
    AdapterRows,
    AdapterSlot,
    RankPool,
    extent_of,
    tile_columns,
    units_of,
)
from slackwater.engine.cuda.attention import (
    BLOCK_TOKENS,
    CudaPagedAttention,
    CudaPagedRows,
    span_tokens,
    tile_rows,
)
from slackwater.engine.cuda.decode_graphs import DecodeGraphs
from slackwater.engine.cuda.forward_pass import CudaForwardPass
from slackwater.engine.cuda.pages import CudaPagePool, device_view
from slackwater.engine.cuda.sampling import CudaSampler
from slackwater.engine.cuda.step_shape import QueuedStep
from slackwater.engine.executor import (
    Executor,
    RowBatch,
    Sampled,
    SamplingColumns,
    Spans,
    cache_arena,
)
from slackwater.engine.pages import PagePool
from slackwater.model.errors import ConfigError
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.loading import net_tensors
from slackwater.nets.lora import LoraAdapter

_PIECE = 8 << 20
_BUFFERS = 12
_THREADS = 6


class HostCopies:
    """Copies to the device on a separate stream, through pinned buffers made at first use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: queue.SimpleQueue[tuple[Tensor, Any]] = queue.SimpleQueue()
        self._stream: Any = None

    def run(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each second tensor to the first, and wait. Steps queued before are not overtaken."""
        if self._stream is None:
            self._prepare()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        pieces = []
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                if _can_copy_bytes(target, source):
                    bytes_of = [x.detach().view(-1).view(torch.uint8) for x in (target, source)]
                    pieces += list(zip(*(x.split(_PIECE) for x in bytes_of), strict=True))
                else:
                    target.detach().copy_(source)
        with ThreadPoolExecutor(_THREADS, "weights to the device") as pool:
            for _ in pool.map(lambda pair: self._copy(*pair), pieces):
                pass
        self._stream.synchronize()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        host, sent = self._buffers.get()
        sent.synchronize()
        part = host[: len(source)].copy_(source)
        with torch.cuda.stream(self._stream):
            target.copy_(part, non_blocking=True)
            sent.record()
        self._buffers.put((host, sent))

    def _prepare(self) -> None:
        new_stream: Any = torch.cuda.Stream
        new_event: Any = torch.cuda.Event
        self._stream = new_stream(self._device)
        for _ in range(_BUFFERS):
            host = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
            self._buffers.put((host, new_event()))


def _can_copy_bytes(target: Tensor, source: Tensor) -> bool:
    """Whether the tensors' bytes can be copied without conversion."""
    alike = source.dtype == target.dtype and source.shape == target.shape
    laid_out = source.is_contiguous() and target.is_contiguous()
    return source.device.type == "cpu" and alike and laid_out


class CudaExecutor(Executor):
    """Rows through a model, or a rank's part of one, on one GPU.

    Steps of several ranks are all eager (`logits`): gloo cannot be captured in a graph.
    """

    begins_ahead = True
    block_tokens = BLOCK_TOKENS

    def __init__(self, net: CausalLM, config: EngineConfig, pool: PagePool | None = None) -> None:
        shape, device = net.rank_config, net.device
        if shape.head_dim & (shape.head_dim - 1) or shape.head_dim < 16:
            raise ConfigError.of("head_dim", shape.head_dim, "must be a power of 2 from 16 on CUDA")
        self._device = device
        self._heads = (shape.num_heads, shape.num_kv_heads)
        self._batch_invariant = bool(config.batch_invariant)
        width = net.dtype.itemsize
        self.block_bytes = shape.kv_values_per_token * BLOCK_TOKENS * width
        self._block_elements = self.block_bytes // width
        pool = pool or CudaPagePool(config.kv_bytes, config.page_bytes, device)
        self.arena = cache_arena(pool, self.block_bytes, config)
        self.arena.hold(0, self.block_bytes)  # PyTorch reads the first address of a view
        self._cache = device_view(self.arena, device).view(net.dtype)
        context = min(config.max_context or shape.max_positions, shape.max_positions)
        blocks = -(-context // BLOCK_TOKENS)
        self._graphs = DecodeGraphs(
            self._cache,
            self._block_elements,
            shape.num_kv_heads,
            config.max_running,
            blocks,
            fixed_spans=self._batch_invariant,
        )
        self._queued: QueuedStep | None = None
        self._host_copies = HostCopies(device)
        self._sampler = CudaSampler(device)
        self._passes: WeakKeyDictionary[CausalLM, CudaForwardPass] = WeakKeyDictionary()
        self._adapters: WeakKeyDictionary[LoraAdapter, AdapterSlot] = WeakKeyDictionary()
        self._ranks = RankPool()

    def prepare(self, net: CausalLM) -> None:
        net.requires_grad_(False)
        self._passes[net] = CudaForwardPass(net, batch_invariant=self._batch_invariant)

    def write(self, net: CausalLM, tensors: Mapping[str, Tensor]) -> None:
        self._queued = None
        with torch.no_grad():
            targets = net_tensors(net)
            self._host_copies.run([(target, tensors[name]) for name, target in targets.items()])

    def prepare_adapter(self, net: CausalLM, adapter: LoraAdapter) -> None:
        """Write an adapter into its units; weights move only when the unit stacks must grow."""
        self._queued = None
        slot = self._adapters.get(adapter)
        if slot is None:
            slot = self._adapters[adapter] = self._allocate(self._passes[net], adapter)
        with torch.no_grad():
            self._passes[net].put(adapter, slot.first, slot.units)

    def drop_adapter(self, adapter: LoraAdapter) -> None:
        self._queued = None
        slot = self._adapters.pop(adapter)
        self._ranks.give_back(slot.first, slot.units)

    def _allocate(self, model: CudaForwardPass, adapter: LoraAdapter) -> AdapterSlot:
        units = units_of(adapter.spec.rank)
        first = self._ranks.take(units)
        if first is None:
            self._ranks.grow(self._ranks.next_size(units))
            self._graphs.forget(model)
            with torch.no_grad():
                model.reserve(self._ranks.units)
            first = self._ranks.take(units)
            assert first is not None, "the stacks have just grown"
        return AdapterSlot(first, units, adapter.spec.scale)

    @torch.inference_mode()
    def logits(self, net: CausalLM, batch: RowBatch, tables: NDArray[np.int32]) -> Tensor:
        self._queued = None
        model = self._passes[net]
        longest = int(batch.positions.max()) + 1
        blocks = -(-longest // BLOCK_TOKENS)
        attention = CudaPagedAttention(
            self._cache,
            self._block_elements,
            self._heads[1],
            self._rows(batch, tables[:, :blocks], longest),
        )
        adapters = self._adapter_rows(batch.spans, len(batch.tokens))
        hidden = model.run_layers(self._to_device(batch.tokens), attention, adapters)
        if not len(batch.logit_rows):
            return hidden.new_empty(0, net.config.vocab_size)
        wanted = hidden[self._to_device(batch.logit_rows)]
        scores = model.logits(wanted, self._adapter_rows(batch.logit_row_spans(), len(wanted)))
        return net.gather_logits(scores)

    @torch.inference_mode()
    def decode(
        self,
        net: CausalLM,
        batch: RowBatch,
        tables: NDArray[np.int32],
        columns: SamplingColumns,
        ahead: NDArray[np.float32] | None = None,
    ) -> tuple[Tensor, *Sampled]:
        model = self._passes[net]
        spans = [(start, stop, self._adapters[adapter]) for start, stop, adapter in batch.spans]
        step, self._queued = self._queued, None
        rows = None if step is None else step.rows_of(model, batch, tables, columns, spans)
        if step is None or rows is None:
            step = self._graphs.launch(model, batch, tables, columns, spans)
            self._sampler.truncate(step.logits, columns, step.answer)
            self._graphs.send(step)
            rows = np.arange(len(batch.tokens))
        whole = len(rows) == len(step.batch.slots)
        if ahead is not None:
            drawn = step.answer[0, : len(rows)] if whole else step.answer[0, self._to_device(rows)]
            later = replace(batch, positions=batch.positions + 1)
            their_columns = replace(columns, uniform=ahead)
            queued = self._graphs.launch(model, later, tables, their_columns, spans, drawn)
            self._graphs.send(queued)
        tokens, logprobs = self._graphs.fetch(step)
        logits = step.logits[: len(tokens)]
        if not whole:
            tokens, logprobs = tokens[rows], logprobs[rows]
            logits = step.logits if ahead is not None else step.logits[self._to_device(rows)]
        if ahead is not None:
            queued.tokens = tokens
            self._queued = queued
        return logits, tokens, logprobs

    def sample(self, logits: Tensor, columns: SamplingColumns) -> Sampled:
        return self._sampler.sample(logits, columns)

    def close(self) -> None:
        self._queued = None
        torch.cuda.synchronize()
        self._graphs.close()
        self._cache = torch.empty(0, device=self._device)
        self._passes.clear()
        self.arena.close()

    def _adapter_rows(self, spans: Spans, rows: int) -> AdapterRows | None:
        if not spans:
            return None
        slots = [(start, stop, self._adapters[adapter]) for start, stop, adapter in spans]
        units = max(slot.first + slot.units for _, _, slot in slots)
        extent = min(extent_of(units), self._ranks.units)
        tiles = self._to_device(tile_columns(rows, slots, PROMPT_TILE))
        return AdapterRows(extent, tiles, tiles, fused=False)

    def _rows(self, batch: RowBatch, tables: NDArray[np.int32], longest: int) -> CudaPagedRows:
        slots, lines = np.unique(batch.slots, return_inverse=True)
        tiles = None
        if not (batch.decode_only or self._batch_invariant):
            tiles = self._to_device(_tiles(lines, batch.positions, tile_rows(*self._heads)))
        programs = len(batch.tokens) * self._heads[1]
        span = span_tokens(programs, fixed=self._batch_invariant)
        return CudaPagedRows(
            self._to_device(np.ascontiguousarray(tables[slots])),
            self._to_device(lines.astype(np.int32)),
            self._to_device(batch.positions.astype(np.int32)),
            span,
            triton.next_power_of_2(-(-longest // span)),
            tiles,
        )

    def _to_device(self, values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _tiles(lines: NDArray[np.int64], positions: NDArray[np.int64], most: int) -> NDArray[np.int32]:
    """Cut the rows into runs of one request, at most `most` long: line, row, rows, position."""
    edges = np.nonzero(np.diff(lines))[0] + 1
    starts = np.concatenate(([0], edges))
    stops = np.concatenate((edges, [len(lines)]))
    tiles = [
        (lines[start], start, min(most, stop - start), positions[start])
        for first, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        for start in range(first, stop, most)
    ]
    return np.array(tiles, np.int32)
