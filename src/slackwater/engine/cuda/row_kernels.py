"""Triton kernels over rows: norm, rotation, activation, and storing keys and values."""

# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x, residual, weight, out, columns, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Root-mean-square norm of a row; with ADD, of `residual += x`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        before = tl.load(residual + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        total = (value + before).to(out.dtype.element_ty)
        tl.store(residual + row * columns + at, total, mask=inside)
        value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / columns + eps)
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, (normed * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(
    qkv, cos, sin, q_norm, k_norm, q, k, v, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one row: normed if asked and turned (q, k), or copied (v)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, HALF)
    inside = at < D // 2
    source = qkv + (row * (HEADS + 2 * KV) + head) * D
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2 + at, mask=inside, other=0.0).to(tl.float32)
    kind = q.dtype.element_ty
    if head >= HEADS + KV:
        target = v + (row * KV + head - HEADS - KV) * D
    else:
        if NORM:
            weight = q_norm
            if head >= HEADS:
                weight = k_norm
            power = tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)
            scale = tl.rsqrt(power / D + eps)
            first = (first * scale).to(kind).to(tl.float32)
            second = (second * scale).to(kind).to(tl.float32)
            low = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(weight + D // 2 + at, mask=inside, other=0.0).to(tl.float32)
            first = (first * low).to(kind).to(tl.float32)
            second = (second * high).to(kind).to(tl.float32)
        c = tl.load(cos + row * (D // 2) + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + row * (D // 2) + at, mask=inside, other=0.0).to(tl.float32)
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
        target = q + (row * HEADS + head) * D
        if head >= HEADS:
            target = k + (row * KV + head - HEADS) * D
    tl.store(target + at, first.to(kind), mask=inside)
    tl.store(target + D // 2 + at, second.to(kind), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, columns, BLOCK: tl.constexpr) -> None:
    """`silu(gate) * up` of a row that has both side by side."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(gate_up + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + at, mask=inside, other=0.0)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + row * columns + at, active * up, mask=inside)


@triton.jit
def store_kernel(
    k, v, cache, tables, slots, positions, layer,
    table_stride, block_stride,
    KV: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """Put one head's key and value of one row into its block."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    block = tl.load(tables + slot * table_stride + place // TOKENS).to(tl.int64)
    at = tl.arange(0, WIDE)
    inside = at < D
    base = block * block_stride + (layer * 2 * KV + head).to(tl.int64) * TOKENS * D
    base += (place % TOKENS) * D
    key = tl.load(k + (row * KV + head) * D + at, mask=inside, other=0.0)
    value = tl.load(v + (row * KV + head) * D + at, mask=inside, other=0.0)
    tl.store(cache + base + at, key, mask=inside)
    tl.store(cache + base + KV * TOKENS * D + at, value, mask=inside)


@triton.jit
def sample_kernel(
    logits, temperature, uniform, tokens, logprobs, vocab,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One token of one row by the inverse of its distribution, or the likeliest at temperature 0."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    source = logits + row * vocab
    asked = tl.load(temperature + row)
    heat = tl.where(asked > 0, asked, 1.0)
    best = tl.full((), float("-inf"), tl.float32)
    best_at = tl.full((), 0, tl.int32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        value = tl.load(source + start + at, mask=start + at < vocab, other=float("-inf"))
        value = value.to(tl.float32)
        top = tl.max(value, axis=0)
        here = tl.argmax(value, axis=0)
        new = tl.maximum(best, top)
        best_at = tl.where(top > best, (start + here).to(tl.int32), best_at)
        total = total * tl.exp((best - new) / heat) + tl.sum(tl.exp((value - new) / heat), axis=0)
        best = new
    aim = tl.load(uniform + row) * total
    reached = tl.full((), 0.0, tl.float32)
    token = best_at
    found = (asked <= 0).to(tl.int32)
    for start in range(0, vocab, BLOCK):
        value = tl.load(source + start + at, mask=start + at < vocab, other=float("-inf"))
        weight = tl.exp((value.to(tl.float32) - best) / heat)
        part = tl.sum(weight, axis=0)
        if (found == 0) & (reached + part > aim):
            running = reached + tl.cumsum(weight, axis=0)
            crossing = tl.sum((running <= aim).to(tl.int32), axis=0)
            crossing = tl.minimum(crossing, BLOCK - 1)
            token = tl.minimum(start + crossing, vocab - 1).to(tl.int32)
            found = tl.full((), 1, tl.int32)
        reached += part
    chosen = tl.load(source + token).to(tl.float32)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, (chosen - best) / heat - tl.log(total))
