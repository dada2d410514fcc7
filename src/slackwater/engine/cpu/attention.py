"""Attention over the paged cache on the CPU: every row on its own, keys in fixed blocks of 16.

A block holds, per layer, keys as `[kv_heads, d, 16]` and values as `[kv_heads, 16, d]`: scores
then run along tokens and outputs along dimensions, both without a sum across lanes.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.cpu.compiled import LANES, compiled, exp_into, lane_sum

BLOCK_TOKENS = 16
_ZERO = np.float32(0)
_TOKENS = np.uint64(BLOCK_TOKENS)
_NONE, _1, _2, _3, _4, _5, _6, _7, _EIGHT = (np.uint64(i) for i in range(9))


@compiled
def _store(cache: Any, at: Any, k: Any, v: Any, row: Any, kv_heads: Any, size: Any) -> None:
    """Put one row's keys and values at their token's place `at` of the layer's part of a block."""
    area = size * _TOKENS
    place = at[1]
    for h in range(kv_heads):
        keys, source = at[0] + h * area + place, (row * kv_heads + h) * size
        for d in range(size):
            cache[keys + d * _TOKENS] = k[source + d]
        values = at[0] + (kv_heads + h) * area + place * size
        for d in range(size):
            cache[values + d] = v[source + d]


@compiled
def _score_block(query: Any, q: Any, cache: Any, k: Any, size: Any, scores: Any, s: Any) -> None:
    """`scores[s : s + 16] = query @ keys[d, 16]`, eight dimensions at a time, in order."""
    for t in range(_TOKENS):
        scores[s + t] = _ZERO
    eight = size - size % _EIGHT
    for d in range(_NONE, eight, _EIGHT):
        at, row = q + d, k + d * _TOKENS
        q0, q1, q2, q3 = query[at], query[at + _1], query[at + _2], query[at + _3]
        q4, q5, q6, q7 = query[at + _4], query[at + _5], query[at + _6], query[at + _7]
        for t in range(_TOKENS):
            total, key = scores[s + t], row + t
            total += q0 * cache[key]
            total += q1 * cache[key + _1 * _TOKENS]
            total += q2 * cache[key + _2 * _TOKENS]
            total += q3 * cache[key + _3 * _TOKENS]
            total += q4 * cache[key + _4 * _TOKENS]
            total += q5 * cache[key + _5 * _TOKENS]
            total += q6 * cache[key + _6 * _TOKENS]
            total += q7 * cache[key + _7 * _TOKENS]
            scores[s + t] = total
    for d in range(eight, size):
        q0 = query[q + d]
        for t in range(_TOKENS):
            scores[s + t] += q0 * cache[k + d * _TOKENS + t]


@compiled
def _add_values(scores: Any, s: Any, cache: Any, v: Any, count: Any, size: Any, out: Any) -> None:
    """`out += scores[s : s + count] @ values[count, d]`, four tokens at a time, in order."""
    four = count - count % _4
    for t in range(_NONE, four, _4):
        p0, p1, p2, p3 = scores[s + t], scores[s + t + _1], scores[s + t + _2], scores[s + t + _3]
        row = v + t * size
        for d in range(size):
            total, value = out[d], row + d
            total += p0 * cache[value]
            total += p1 * cache[value + size]
            total += p2 * cache[value + _2 * size]
            total += p3 * cache[value + _3 * size]
            out[d] = total
    for t in range(four, count):
        p0 = scores[s + t]
        for d in range(size):
            out[d] += p0 * cache[v + t * size + d]


@compiled
def _softmax(scores: Any, count: Any, scale: Any, powers: Any, lanes: Any) -> Any:
    """Turn scores into weights that sum to the returned total."""
    top = scores[0]
    for t in range(count):
        top = max(top, scores[t])
    for t in range(count):
        scores[t] = (scores[t] - top) * scale
    exp_into(scores, count, powers)
    return lane_sum(scores, count, lanes)


@compiled
def _attend_head(
    query: Any, q: Any, cache: Any, table: Any, stride: Any, part: Any, values: Any, length: Any,
    size: Any, scores: Any, powers: Any, lanes: Any, out: Any,
) -> None:  # fmt: skip
    """One query head over the keys at `part` and the values at `values` of each of its blocks."""
    blocks = (length + _TOKENS - _1) // _TOKENS
    for b in range(blocks):
        keys = np.uint64(table[b]) * stride + part
        _score_block(query, q, cache, keys, size, scores, b * _TOKENS)
    scale = np.float32(1.0 / np.sqrt(np.float64(size)))
    total = _softmax(scores, np.int64(length), scale, powers, lanes)
    for d in range(size):
        out[d] = _ZERO
    for b in range(blocks):
        first = b * _TOKENS
        at = np.uint64(table[b]) * stride + values
        _add_values(scores, first, cache, at, min(_TOKENS, length - first), size, out)
    for d in range(size):
        out[d] /= total


@compiled
def attend_rows(
    q: Any, k: Any, v: Any, cache: Any, layer: Any, tables: Any, slots: Any, positions: Any,
    heads: Any, kv_heads: Any, size: Any, stride: Any, out: Any,
) -> None:  # fmt: skip
    """Store all rows' keys and values, then attend each; rows at position -1 are padding.

    All but the tables is flat, and offsets are unsigned: no index needs a sign or bounds check.
    """
    rows = np.uint64(slots.shape[0])
    area = size * _TOKENS
    base = layer * _2 * kv_heads * area
    longest = np.int64(0)
    for n in range(rows):
        if positions[n] >= 0:
            longest = max(longest, positions[n] + 1)
            at = np.uint64(positions[n])
            block = np.uint64(tables[slots[n], at // _TOKENS])
            _store(cache, (block * stride + base, at % _TOKENS), k, v, n, kv_heads, size)
    room = (longest + 15) // 16 * 16
    scores, powers = np.empty(room, np.float32), np.empty(room, np.int32)
    lanes, result = np.empty(LANES, np.float32), np.empty(size, np.float32)
    for n in range(rows):
        for head in range(heads):
            row = (n * heads + head) * size
            if positions[n] < 0:
                result[:] = _ZERO
            else:
                shared = head // (heads // kv_heads)
                part = base + shared * area
                _attend_head(
                    q, row, cache, tables[slots[n]], stride, part, part + kv_heads * area,
                    np.uint64(positions[n]) + _1, size, scores, powers, lanes, result,
                )  # fmt: skip
            for d in range(size):
                out[row + d] = result[d]


class CpuPagedAttention:
    """One step's rows over the cache `[blocks, elements per block]`."""

    def __init__(
        self,
        cache: NDArray[np.float32],
        tables: NDArray[np.int32],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> None:
        self._cache, self._tables = cache.reshape(-1), tables
        self._stride = np.uint64(cache.shape[1])
        self._slots, self._positions = slots, positions

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty(q.shape)
        attend_rows(
            q.view(-1).numpy(),
            k.view(-1).numpy(),
            v.view(-1).numpy(),
            self._cache,
            np.uint64(layer),
            self._tables,
            self._slots,
            self._positions,
            np.uint64(q.shape[1]),
            np.uint64(k.shape[1]),
            np.uint64(q.shape[2]),
            self._stride,
            out.view(-1).numpy(),
        )
        return out
