"""Attention over the paged cache on CUDA: decode rows by spans, prompt chunks by tiles."""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from slackwater.engine.cuda.attention_kernels import decode_kernel, join_kernel, prompt_kernel
from slackwater.engine.cuda.early_start import EarlyStart

BLOCK_TOKENS = 64
_SHORT_SPAN, _LONG_SPAN = 256, 1024
_MANY_PROGRAMS = 192
_LOG2E = 1.4426950408889634
_DECODE_TILE = 32  # keys that a decoding program looks at together
_TILE = 128  # rows of a prompt tile times heads per key head


@dataclass(frozen=True, slots=True)
class CudaPagedRows:
    """Where a step's keys and values are: `tables[slots[n]]` are the blocks of row n.

    `tiles` is None if every row decodes. Contexts are then cut every `span` tokens, into at most
    `spans` spans.
    """

    tables: Tensor
    slots: Tensor
    positions: Tensor
    span: int
    spans: int
    tiles: Tensor | None


class CudaPagedAttention:
    """Attention of one step's queries over the cache, a flat tensor of key and value blocks."""

    def __init__(
        self, cache: Tensor, block_elements: int, kv_heads: int, rows: CudaPagedRows
    ) -> None:
        self.cache, self.block_elements, self.rows = cache, block_elements, rows
        self._kv_heads = kv_heads

    def __call__(self, layer: int, q: Tensor, early: EarlyStart) -> Tensor:
        if self.rows.tiles is None:
            return self._decode(layer, q, self._kv_heads, early)
        return self._prompt(layer, q, self._kv_heads, self.rows.tiles)

    def _decode(self, layer: int, q: Tensor, kv_heads: int, early: EarlyStart) -> Tensor:
        rows, (count, heads, size) = self.rows, q.shape
        out = torch.empty_like(q)
        spans = rows.spans
        parts = stats = out
        if spans > 1:
            parts = q.new_empty((count, heads, spans, size), dtype=torch.float32)
            stats = q.new_empty((count, heads, spans, 2), dtype=torch.float32)
        decode_kernel[(count, kv_heads, spans)](
            q, self.cache, rows.tables, rows.slots, rows.positions, parts, stats, out, layer,
            _LOG2E / math.sqrt(size), rows.tables.stride(0), self.block_elements,
            HEADS=heads, KV=kv_heads, GROUP=max(16, triton.next_power_of_2(heads // kv_heads)),
            D=size, TOKENS=BLOCK_TOKENS, TILE=_DECODE_TILE, SPAN=rows.span, SPANS=spans,
            num_warps=2, num_stages=6, **early,
        )  # fmt: skip
        if spans > 1:
            join_kernel[(count, heads)](
                parts, stats, rows.positions, out,
                HEADS=heads, D=size, SPAN=rows.span, SPANS=spans,
                num_warps=1, **early,
            )  # fmt: skip
        return out

    def _prompt(self, layer: int, q: Tensor, kv_heads: int, tiles: Tensor) -> Tensor:
        rows, (_, heads, size) = self.rows, q.shape
        out = torch.empty_like(q)
        group = triton.next_power_of_2(heads // kv_heads)
        prompt_kernel[(len(tiles), kv_heads)](
            q, self.cache, rows.tables, tiles, out, layer, _LOG2E / math.sqrt(size),
            rows.tables.stride(0), self.block_elements,
            HEADS=heads, KV=kv_heads, GROUP=group, D=size, TOKENS=BLOCK_TOKENS,
            ROWS=max(1, _TILE // group),
            num_warps=8, num_stages=2,
        )  # fmt: skip
        return out


def span_tokens(programs: int, *, fixed: bool) -> int:
    """The span length with which few rows still fill a device; `fixed`: the same in every batch."""
    return _SHORT_SPAN if fixed or programs < _MANY_PROGRAMS else _LONG_SPAN


def tile_rows(heads: int, kv_heads: int) -> int:
    """Rows of one request that a tile holds."""
    rows: int = max(1, _TILE // triton.next_power_of_2(heads // kv_heads))
    return rows
