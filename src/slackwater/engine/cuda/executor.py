"""The CUDA executor: the cache in device pages, decode steps as graphs, the rest eager."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.config import EngineConfig
from slackwater.engine.cuda.attention import (
    BLOCK_TOKENS,
    SPAN_TOKENS,
    CudaPagedAttention,
    PagedRows,
    tile_rows,
)
from slackwater.engine.cuda.decode_graphs import DecodeGraphs
from slackwater.engine.cuda.ops import CudaOps
from slackwater.engine.cuda.pages import CudaPagePool, device_view
from slackwater.engine.cuda.sampling import CudaSampler
from slackwater.engine.executor import RowBatch, SamplingColumns
from slackwater.engine.pages import PageArena, PagePool
from slackwater.model.errors import ConfigError
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.loading import net_tensors
from slackwater.nets.lora import LoraAdapter, RowAdapters


class CudaExecutor:
    """Rows through a model on one GPU."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, net: CausalLM, config: EngineConfig, pool: PagePool | None = None) -> None:
        shape, device = net.config, net.device
        if shape.head_dim & (shape.head_dim - 1) or shape.head_dim < 16:
            raise ConfigError.of("head_dim", shape.head_dim, "must be a power of 2 from 16 on CUDA")
        self._device = device
        self._heads = (shape.num_heads, shape.num_kv_heads)
        self._batch_invariant = bool(config.batch_invariant)
        width = net.dtype.itemsize
        self.block_bytes = shape.kv_values_per_token * BLOCK_TOKENS * width
        self._block_elements = self.block_bytes // width
        self._pool = pool or CudaPagePool(config.kv_bytes, config.page_bytes, device)
        room = self._pool.capacity * self._pool.page_bytes
        if room < 2 * self.block_bytes:
            fix = f"must hold 2 blocks of {self.block_bytes} bytes"
            raise ConfigError.of("kv_bytes", config.kv_bytes, fix)
        self.arena = PageArena(self._pool, room)
        self.arena.hold(0, self.block_bytes)  # PyTorch looks at the first address of a view
        self._cache = device_view(self.arena, device).view(net.dtype)
        self._ops = CudaOps(batch_invariant=self._batch_invariant)
        context = min(config.max_context or shape.max_positions, shape.max_positions)
        blocks = -(-context // BLOCK_TOKENS)
        self._graphs = DecodeGraphs(
            self._cache, self._block_elements, self._ops, config.max_running, blocks
        )
        self._sampler = CudaSampler(device)

    def prepare(self, net: CausalLM) -> None:
        net.requires_grad_(False)
        net.fuse()

    def write(self, net: CausalLM, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, target in net_tensors(net).items():
                target.copy_(tensors[name])

    def prepare_adapter(self, net: CausalLM, adapter: LoraAdapter) -> None:
        """Adapters are read as they are."""

    @torch.inference_mode()
    def logits(self, net: CausalLM, batch: RowBatch, tables: NDArray[np.int32]) -> Tensor:
        longest = int(batch.positions.max()) + 1
        blocks, spans = -(-longest // BLOCK_TOKENS), _power_of_2(-(-longest // SPAN_TOKENS))
        if batch.decode_only and not batch.spans:
            lines = tables[batch.slots, :blocks]
            return self._graphs.logits(net, batch.tokens, batch.positions, lines, spans)
        attention = CudaPagedAttention(
            self._cache, self._block_elements, self._rows(batch, tables[:, :blocks], spans)
        )
        hidden = net.hidden(
            self._sent(batch.tokens),
            self._sent(batch.positions),
            attention,
            adapters=RowAdapters(batch.spans) if batch.spans else None,
            ops=self._ops,
        )
        if not len(batch.wanted):
            return hidden.new_empty(0, net.config.vocab_size)
        wanted = hidden[self._sent(batch.wanted)]
        adapted = batch.wanted_spans()
        return net.logits(wanted, adapters=RowAdapters(adapted) if adapted else None, ops=self._ops)

    def sample(
        self, logits: Tensor, columns: SamplingColumns
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return self._sampler.sample(logits, columns)

    def _rows(self, batch: RowBatch, tables: NDArray[np.int32], spans: int) -> PagedRows:
        slots, lines = np.unique(batch.slots, return_inverse=True)
        tiles = None
        if not (batch.decode_only or self._batch_invariant):
            tiles = self._sent(_tiles(lines, batch.positions, tile_rows(*self._heads)))
        return PagedRows(
            self._sent(np.ascontiguousarray(tables[slots])),
            self._sent(lines.astype(np.int32)),
            self._sent(batch.positions.astype(np.int32)),
            spans,
            tiles,
        )

    def _sent(self, values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
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


def _power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
