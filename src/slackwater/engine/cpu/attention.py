"""Rotation and attention over the paged cache on the CPU: every row on its own, keys in fixed blocks of 16.

A block holds, per layer, keys as `[kv_heads, d, 16]` and values as `[kv_heads, 16, d]`: scores
then run along tokens and outputs along dimensions, both without a sum across lanes.
"""

from typing import Any

import numpy as np

from slackwater.engine.cpu.compiled import LANES, compiled, exp_of, lane_max, lane_sum

BLOCK_TOKENS = 16
_ZERO, _ONE, _NEVER = np.float32(0), np.float32(1), np.float32(-1e30)
_TOKENS = np.uint64(BLOCK_TOKENS)
_NONE, _1, _2, _3, _4, _5, _6, _7, _EIGHT = (np.uint64(i) for i in range(9))


@compiled
def _turn_head(
    qkv: Any, at: Any, norm: Any, eps: Any, cos: Any, sin: Any, angle: Any, half: Any, out: Any
) -> None:
    """The head at `qkv[at:]`, normed where `norm` has a weight, turned by the angles at `angle`."""
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


@compiled
def _store(cache: Any, keys: Any, values: Any, key: Any, qkv: Any, v: Any, size: Any) -> None:
    """Put one head's turned key, and its value at `qkv[v:]`, at their places in the cache."""
    for d in range(size):
        cache[keys + d * _TOKENS] = key[d]
    for d in range(size):
        cache[values + d] = qkv[v + d]


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
def _softmax(scores: Any, length: Any, room: Any, scale: Any, lanes: Any) -> Any:
    """Turn scores into weights that sum to the returned total; `room` is `length` in whole blocks."""
    for t in range(length, room):
        scores[t] = _NEVER
    top = lane_max(scores, room, lanes)
    for t in range(room):
        scores[t] = exp_of((scores[t] - top) * scale)
    return lane_sum(scores, room, lanes)


@compiled
def _attend_head(
    query: Any, cache: Any, table: Any, stride: Any, part: Any, values: Any, length: Any,
    size: Any, scores: Any, lanes: Any, out: Any,
) -> None:  # fmt: skip
    """One query head over the keys at `part` and the values at `values` of each of its blocks."""
    blocks = (length + _TOKENS - _1) // _TOKENS
    for b in range(blocks):
        keys = np.uint64(table[b]) * stride + part
        _score_block(query, _NONE, cache, keys, size, scores, b * _TOKENS)
    scale = np.float32(1.0 / np.sqrt(np.float64(size)))
    total = _softmax(scores, np.int64(length), np.int64(blocks * _TOKENS), scale, lanes)
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
    qkv: Any, q_norm: Any, k_norm: Any, eps: Any, cos: Any, sin: Any, cache: Any, layer: Any,
    stride: Any, tables: Any, slots: Any, positions: Any, heads: Any, kv_heads: Any, out: Any,
) -> None:  # fmt: skip
    """Store all rows' turned keys and values in the cache, then attend with each turned query.

    All but the tables is flat, and offsets are unsigned: no index needs a sign or bounds check.
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
    scores = np.empty((longest + 15) // 16 * 16, np.float32)
    lanes = np.empty(LANES, np.float32)
    for n in range(rows):
        at = np.uint64(positions[n])
        for h in range(heads):
            _turn_head(qkv, n * width + h * size, q_norm, eps, cos, sin, at * half, half, head)
            part = base + h // (heads // kv_heads) * area
            _attend_head(
                head, cache, tables[slots[n]], stride, part, part + kv_heads * area, at + _1,
                size, scores, lanes, result,
            )  # fmt: skip
            to = (n * heads + h) * size
            for d in range(size):
                out[to + d] = result[d]
