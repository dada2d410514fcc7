"""Triton kernels for grouped-query attention over the paged cache.

A block is 64 tokens: per layer, keys `[kv_heads, 64, d]`, then values the same. Decoding cuts a
context into spans of a fixed length, each by its own program, and joins them; a prompt's chunk goes
by tiles of rows. The heads that share a key head are rows of one product.
"""

# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from slackwater.engine.cuda.early_start import let_successor_start, wait_for_predecessor


# Specialized numbers would mean a compilation for each kind.
@triton.jit(do_not_specialize=["layer", "table_stride"])
def decode_kernel(
    q, cache, tables, slots, positions, parts, stats, out,
    layer, scale, table_stride, block_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row, one key head, one span of its context, by tiles that lie within a block."""
    if EARLY:
        let_successor_start()
        wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    span = tl.program_id(2)
    length = tl.load(positions + row) + 1
    start = span * SPAN
    if start >= length:
        return
    stop = tl.minimum(start + SPAN, length)
    slot = tl.load(slots + row).to(tl.int64)
    per_key: tl.constexpr = HEADS // KV
    g = tl.arange(0, GROUP)
    d = tl.arange(0, D)
    t = tl.arange(0, TILE)
    first = row * HEADS + head * per_key
    mine = (g < per_key)[:, None]
    query = tl.load(q + (first + g[:, None]) * D + d[None, :], mask=mine, other=0.0)
    base = (layer * 2 * KV + head).to(tl.int64) * TOKENS * D
    inside = t[:, None] * D + d[None, :]
    top = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    acc = tl.zeros((GROUP, D), tl.float32)
    for begin in range(start, stop, TILE):
        block = tl.load(tables + slot * table_stride + begin // TOKENS).to(tl.int64)
        place = cache + (block * block_stride + base + (begin % TOKENS) * D)
        keys = tl.load(place + inside)
        values = tl.load(place + KV * TOKENS * D + inside)
        score = tl.dot(query, tl.trans(keys)) * scale
        seen = begin + t < stop
        score = tl.where(seen[None, :], score, float("-inf"))
        new = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - new[:, None])
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(weight, axis=1)
        values = tl.where(seen[:, None], values, 0.0)
        acc = acc * fade[:, None] + tl.dot(weight.to(values.dtype), values)
        top = new
    if SPANS == 1:
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + (first + g[:, None]) * D + d[None, :], result, mask=mine)
    else:
        at = (first + g) * SPANS + span
        tl.store(parts + at[:, None] * D + d[None, :], acc, mask=mine)
        tl.store(stats + at * 2, top, mask=g < per_key)
        tl.store(stats + at * 2 + 1, total, mask=g < per_key)


@triton.jit
def join_kernel(
    parts, stats, positions, out,
    HEADS: tl.constexpr, D: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Join the spans of one head of one row, in order."""
    if EARLY:
        let_successor_start()
        wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    at = row * HEADS + tl.program_id(1)
    length = tl.load(positions + row) + 1
    d = tl.arange(0, D)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((D,), tl.float32)
    for span in range(0, tl.cdiv(length, SPAN)):
        other = tl.load(stats + (at * SPANS + span) * 2)
        weight = tl.load(stats + (at * SPANS + span) * 2 + 1)
        part = tl.load(parts + (at * SPANS + span) * D + d)
        new = tl.maximum(top, other)
        acc = acc * tl.exp2(top - new) + part * tl.exp2(other - new)
        total = total * tl.exp2(top - new) + weight * tl.exp2(other - new)
        top = new
    tl.store(out + at * D + d, (acc / total).to(out.dtype.element_ty))


# Specialized numbers would mean a compilation for each kind.
@triton.jit(do_not_specialize=["layer", "table_stride"])
def prompt_kernel(
    q, cache, tables, tiles, out,
    layer, scale, table_stride, block_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of consecutive rows of one request: `tiles` holds slot, first row, rows, position."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(tiles + tile * 4).to(tl.int64)
    first_row = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    rows = tl.load(tiles + tile * 4 + 2)
    position = tl.load(tiles + tile * 4 + 3)
    per_key: tl.constexpr = HEADS // KV
    m = tl.arange(0, ROWS * GROUP)
    r = m // GROUP
    g = m % GROUP
    d = tl.arange(0, D)
    t = tl.arange(0, TOKENS)
    mine = ((r < rows) & (g < per_key))[:, None]
    at = ((first_row + r) * HEADS + head * per_key + g)[:, None] * D + d[None, :]
    query = tl.load(q + at, mask=mine, other=0.0)
    base = (layer * 2 * KV + head).to(tl.int64) * TOKENS * D
    inside = t[:, None] * D + d[None, :]
    top = tl.full((ROWS * GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS * GROUP,), tl.float32)
    acc = tl.zeros((ROWS * GROUP, D), tl.float32)
    stop = position + rows
    for begin in range(0, stop, TOKENS):
        block = tl.load(tables + slot * table_stride + begin // TOKENS).to(tl.int64)
        keys = tl.load(cache + (block * block_stride + base) + inside)
        values = tl.load(cache + (block * block_stride + base + KV * TOKENS * D) + inside)
        score = tl.dot(query, tl.trans(keys)) * scale
        seen = (begin + t)[None, :] <= (position + r)[:, None]
        score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - new[:, None])
        fade = tl.exp2(top - new)
        total = total * fade + tl.sum(weight, axis=1)
        values = tl.where((begin + t < stop)[:, None], values, 0.0)
        acc = acc * fade[:, None] + tl.dot(weight.to(values.dtype), values)
        top = new
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=mine)
