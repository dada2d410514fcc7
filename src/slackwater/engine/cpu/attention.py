"""Rotation and attention over the paged cache on the CPU, row by row, keys in blocks of 16.

A block holds, per layer, keys as `[kv_heads, d, 16]` and values as `[kv_heads, 16, d]`: scores are
then vectors along tokens and outputs vectors along dimensions, without sums across lanes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types

from slackwater.engine.cpu.compiled import (
    compile_loop,
    exp_nonpositive,
    lane_max,
    lane_sum,
    llvm_intrinsic,
)
from slackwater.engine.cpu.vector_code import INT64, LANES, Value, VectorCode

BLOCK_TOKENS = LANES
_ZERO, _ONE, _NEVER = np.float32(0), np.float32(1), np.float32(-1e30)
_TOKENS = np.uint64(BLOCK_TOKENS)
_NONE, _1, _2, _4 = (np.uint64(i) for i in (0, 1, 2, 4))


@compile_loop
def _turn_head(
    qkv: Any, at: Any, norm: Any, eps: Any, cos: Any, sin: Any, angle: Any, half: Any, out: Any
) -> None:
    """Rotate the head at `qkv[at:]` by the angles at `angle`, after its norm if there is one."""
    if norm.shape[0] == 0:
        for d in range(half):
            first, second = qkv[at + d], qkv[at + half + d]
            out[d] = first * cos[angle + d] - second * sin[angle + d]
            out[half + d] = second * cos[angle + d] + first * sin[angle + d]
        return
    low = high = _ZERO
    for d in range(half):
        low += qkv[at + d] * qkv[at + d]
        high += qkv[at + half + d] * qkv[at + half + d]
    scale = _ONE / np.sqrt((low + high) / np.float32(_2 * half) + eps)
    for d in range(half):
        first = qkv[at + d] * scale * norm[d]
        second = qkv[at + half + d] * scale * norm[half + d]
        out[d] = first * cos[angle + d] - second * sin[angle + d]
        out[half + d] = second * cos[angle + d] + first * sin[angle + d]


@compile_loop
def _store(cache: Any, keys: Any, values: Any, key: Any, qkv: Any, v: Any, size: Any) -> None:
    """Store one head's rotated key, and its value at `qkv[v:]`, in the cache."""
    for d in range(size):
        cache[keys + d * _TOKENS] = key[d]
    for d in range(size):
        cache[values + d] = qkv[v + d]


@llvm_intrinsic(types.void, *([types.uintp] * 4))
def _score_block(builder: Any, query: Any, keys: Any, size: Any, scores: Any) -> None:
    """`scores[:16] = query @ keys[size, 16]`: even dimensions and odd ones, each in order."""
    code = VectorCode(builder)
    query, keys, scores = (code.floats(each) for each in (query, keys, scores))

    def add(d: Value, sums: Sequence[Value]) -> list[Value]:
        further = []
        for odd, total in enumerate(sums):
            place = builder.add(builder.mul(d, INT64(2)), INT64(odd))
            column = code.load(keys, builder.mul(place, INT64(BLOCK_TOKENS)))
            further.append(code.multiply_add(code.broadcast(query, place), column, total))
        return further

    pairs = builder.udiv(size, INT64(2))
    even, odd = code.loop(pairs, [code.zero(), code.zero()], add)
    code.store(builder.fadd(even, odd), scores, INT64(0))


@llvm_intrinsic(types.void, *([types.uintp] * 5))
def _add_slice(builder: Any, weights: Any, values: Any, count: Any, size: Any, out: Any) -> None:
    """`out[:16] += weights[:count] @ values[count, :16]`, in order; tokens are `size` apart."""
    code = VectorCode(builder)
    weights, values, out = (code.floats(each) for each in (weights, values, out))

    def add(t: Value, sums: Sequence[Value]) -> list[Value]:
        row = code.load(values, builder.mul(t, size))
        return [code.multiply_add(code.broadcast(weights, t), row, sums[0])]

    (total,) = code.loop(count, [code.load(out, INT64(0))], add)
    code.store(total, out, INT64(0))


@compile_loop
def _add_values(scores: Any, s: Any, cache: Any, v: Any, count: Any, size: Any, out: Any) -> None:
    """`out += scores[s : s + count] @ values[count, d]`, for the rest of a head in slices of 16."""
    for d in range(size - size % _TOKENS, size):
        total = out[d]
        for t in range(count):
            total += scores[s + t] * cache[v + t * size + d]
        out[d] = total


@compile_loop
def _softmax(scores: Any, length: Any, room: Any, scale: Any) -> Any:
    """Turn scores into weights, and return their sum; `room` is `length` rounded up to blocks."""
    for t in range(length, room):
        scores[t] = _NEVER
    top = lane_max(scores, room)
    for t in range(room):
        scores[t] = exp_nonpositive((scores[t] - top) * scale)
    return lane_sum(scores, room)


@compile_loop
def _attend_head(
    query: Any, cache: Any, table: Any, line: Any, stride: Any, part: Any, values: Any,
    length: Any, size: Any, scale: Any, scores: Any, out: Any,
) -> None:  # fmt: skip
    """One query head over the keys at `part` and the values at `values` of each of its blocks."""
    blocks = (length + _TOKENS - _1) // _TOKENS
    query_at, cache_at = np.uint64(query.ctypes.data), np.uint64(cache.ctypes.data)
    scores_at, out_at = np.uint64(scores.ctypes.data), np.uint64(out.ctypes.data)
    for b in range(blocks):
        keys = np.uint64(table[line, b]) * stride + part
        _score_block(query_at, cache_at + keys * _4, size, scores_at + b * _TOKENS * _4)
    total = _softmax(scores, np.int64(length), np.int64(blocks * _TOKENS), scale)
    for d in range(size):
        out[d] = _ZERO
    for b in range(blocks):
        first = b * _TOKENS
        at = np.uint64(table[line, b]) * stride + values
        count = min(_TOKENS, length - first)
        for d in range(_NONE, size - size % _TOKENS, _TOKENS):
            weights, there = scores_at + first * _4, cache_at + (at + d) * _4
            _add_slice(weights, there, count, size, out_at + d * _4)
        if size % _TOKENS > _NONE:
            _add_values(scores, first, cache, at, count, size, out)
    for d in range(size):
        out[d] /= total


@compile_loop
def attend_rows(
    qkv: Any, q_norm: Any, k_norm: Any, eps: Any, cos: Any, sin: Any, cache: Any, layer: Any,
    stride: Any, tables: Any, slots: Any, positions: Any, heads: Any, kv_heads: Any, out: Any,
) -> None:  # fmt: skip
    """Store all rows' rotated keys and values in the cache, then attend with each rotated query.

    All arrays except the tables are flat, and offsets are unsigned: no index needs a sign check.
    """
    rows = np.uint64(slots.shape[0])
    width = np.uint64(qkv.shape[0]) // rows
    size = width // (heads + _2 * kv_heads)
    half, area = size // _2, size * _TOKENS
    base = layer * _2 * kv_heads * area
    head, result = np.empty(size, np.float32), np.empty(size, np.float32)
    longest = np.int64(0)
    for n in range(rows):
        longest = max(longest, positions[n] + 1)
        at = np.uint64(positions[n])
        place = at % _TOKENS
        block = np.uint64(tables[slots[n], at // _TOKENS]) * stride + base
        for h in range(kv_heads):
            source = n * width + (heads + h) * size
            _turn_head(qkv, source, k_norm, eps, cos, sin, at * half, half, head)
            keys, values = block + h * area + place, block + (kv_heads + h) * area + place * size
            _store(cache, keys, values, head, qkv, source + kv_heads * size, size)
    scale = np.float32(1.0 / np.sqrt(np.float64(size)))
    scores = np.empty((longest + 15) // 16 * 16, np.float32)
    for n in range(rows):
        at = np.uint64(positions[n])
        for h in range(heads):
            _turn_head(qkv, n * width + h * size, q_norm, eps, cos, sin, at * half, half, head)
            part = base + h // (heads // kv_heads) * area
            _attend_head(
                head, cache, tables, slots[n], stride, part, part + kv_heads * area, at + _1,
                size, scale, scores, result,
            )  # fmt: skip
            to = (n * heads + h) * size
            for d in range(size):
                out[to + d] = result[d]
