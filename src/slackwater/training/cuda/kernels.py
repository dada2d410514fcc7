"""Triton kernels of a training pass, forward and backward: norms, rotation, gate, log-probs, and
joining of attention.

All compute in fp32 and round once. If a weight's gradient is needed, each program writes a partial
sum.
"""

# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    x, residual, weight, total, out, columns, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Root-mean-square norm of a row; with ADD, of `total = x + residual`."""
    kind = out.dtype.element_ty
    at = tl.arange(0, BLOCK)
    inside = at < columns
    place = tl.program_id(0).to(tl.int64) * columns + at
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        before = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        both = (value + before).to(kind)
        tl.store(total + place, both, mask=inside)
        value = both.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / columns + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (value * scale * factor).to(kind), mask=inside)


@triton.jit
def norm_backward(
    g, passed, total, weight, dx, dweight, rows, columns, eps,
    PASSED: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of rows `program, program + programs, ...`; with PASSED, plus the sum's own."""
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    partial = tl.zeros((BLOCK,), tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * columns + at
        value = tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / columns + eps)
        unit = value * scale
        pull = tl.sum(grad * factor * unit, axis=0) / columns
        result = scale * (grad * factor - unit * pull)
        if PASSED:
            result += tl.load(passed + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + place, result.to(dx.dtype.element_ty), mask=inside)
        if WEIGHT:
            partial += grad * unit
    if WEIGHT:
        tl.store(dweight + first * columns + at, partial, mask=inside)


@triton.jit
def rotate_forward(
    x, weight, cos, sin, out, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """All heads of a row: normed with NORM, then rotated by the row's angles."""
    row = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, LINES), tl.arange(0, BLOCK)
    mine = (head < HEADS)[:, None] & (at < HALF)[None, :]
    place = (row * HEADS + head)[:, None] * (2 * HALF) + at[None, :]
    low = tl.load(x + place, mask=mine, other=0.0).to(tl.float32)
    high = tl.load(x + place + HALF, mask=mine, other=0.0).to(tl.float32)
    if NORM:
        power = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = tl.rsqrt(power / (2 * HALF) + eps)[:, None]
        low *= scale * tl.load(weight + at, mask=at < HALF, other=0.0)[None, :].to(tl.float32)
        above = tl.load(weight + HALF + at, mask=at < HALF, other=0.0)
        high *= scale * above[None, :].to(tl.float32)
    c = tl.load(cos + row * HALF + at, mask=at < HALF, other=0.0)[None, :].to(tl.float32)
    s = tl.load(sin + row * HALF + at, mask=at < HALF, other=0.0)[None, :].to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + place, (low * c - high * s).to(kind), mask=mine)
    tl.store(out + place + HALF, (high * c + low * s).to(kind), mask=mine)


@triton.jit
def rotate_backward(
    g, x, weight, cos, sin, dx, dweight, rows, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of rows `program, program + programs, ...`: rotated back, then through the norm."""
    first = tl.program_id(0)
    head, at = tl.arange(0, LINES), tl.arange(0, BLOCK)
    there = at < HALF
    mine = (head < HEADS)[:, None] & there[None, :]
    kind = dx.dtype.element_ty
    low_sum = tl.zeros((BLOCK,), tl.float32)
    high_sum = tl.zeros((BLOCK,), tl.float32)
    for number in range(first, rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        place = (row * HEADS + head)[:, None] * (2 * HALF) + at[None, :]
        one = tl.load(g + place, mask=mine, other=0.0).to(tl.float32)
        two = tl.load(g + place + HALF, mask=mine, other=0.0).to(tl.float32)
        c = tl.load(cos + row * HALF + at, mask=there, other=0.0)[None, :].to(tl.float32)
        s = tl.load(sin + row * HALF + at, mask=there, other=0.0)[None, :].to(tl.float32)
        low, high = one * c + two * s, two * c - one * s
        if NORM:
            lower = tl.load(weight + at, mask=there, other=0.0)[None, :].to(tl.float32)
            upper = tl.load(weight + HALF + at, mask=there, other=0.0)[None, :].to(tl.float32)
            below = tl.load(x + place, mask=mine, other=0.0).to(tl.float32)
            above = tl.load(x + place + HALF, mask=mine, other=0.0).to(tl.float32)
            power = tl.sum(below * below, axis=1) + tl.sum(above * above, axis=1)
            scale = tl.rsqrt(power / (2 * HALF) + eps)[:, None]
            below, above = below * scale, above * scale
            if WEIGHT:
                low_sum += tl.sum(low * below, axis=0)
                high_sum += tl.sum(high * above, axis=0)
            low, high = low * lower, high * upper
            pull = (tl.sum(low * below, axis=1) + tl.sum(high * above, axis=1)) / (2 * HALF)
            low = scale * (low - below * pull[:, None])
            high = scale * (high - above * pull[:, None])
        tl.store(dx + place, low.to(kind), mask=mine)
        tl.store(dx + place + HALF, high.to(kind), mask=mine)
    if WEIGHT:
        tl.store(dweight + first * (2 * HALF) + at, low_sum, mask=there)
        tl.store(dweight + first * (2 * HALF) + HALF + at, high_sum, mask=there)


@triton.jit
def gate_forward(gate, up, out, count, BLOCK: tl.constexpr) -> None:
    """`silu(gate) * up`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    one = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    result = one / (1.0 + tl.exp(-one)) * two
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward(g, gate, up, dgate, dup, count, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    kind = dup.dtype.element_ty
    grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    one = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-one))
    tl.store(dup + at, (grad * one * sigmoid).to(kind), mask=inside)
    slope = sigmoid * (1.0 + one * (1.0 - sigmoid))
    tl.store(dgate + at, (grad * two * slope).to(kind), mask=inside)


@triton.jit
def normaliser_kernel(logits, out, vocab, BLOCK: tl.constexpr) -> None:
    """The logarithm of the sum of a row's exponentials, each lane by itself until the end."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        place = start + at
        value = tl.load(logits + row * vocab + place, mask=place < vocab, other=-1e30)
        value = value.to(tl.float32)
        new = tl.maximum(top, value)
        total = total * tl.exp(top - new) + tl.exp(value - new)
        top = new
    best = tl.max(top, axis=0)
    tl.store(out + row, best + tl.log(tl.sum(total * tl.exp(top - best), axis=0)))


@triton.jit
def logits_backward(logits, normaliser, strength, vocab, BLOCK: tl.constexpr) -> None:
    """Replace logits by `-strength * probability`: the gradient without the targets' part."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * vocab + at
    value = tl.load(place, mask=at < vocab, other=0.0).to(tl.float32)
    share = tl.exp(value - tl.load(normaliser + row))
    result = -tl.load(strength + row) * share
    tl.store(place, result.to(logits.dtype.element_ty), mask=at < vocab)


@triton.jit
def join_rows(
    out, lse, other, other_lse, joined, index, rows, all_rows,
    HEADS: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Join the attention of a row over two sets of keys: row r of `other` into row `index[r]` of
    `out`.

    The new normalisers go to `joined`, because other warps may still read the old ones.
    """
    number = tl.program_id(0)
    row = tl.load(index + number)
    head, at = tl.arange(0, LINES), tl.arange(0, BLOCK)
    real = head < HEADS
    mine = real[:, None] & (at < SIZE)[None, :]
    one = tl.load(lse + head.to(tl.int64) * all_rows + row, mask=real, other=0.0)
    two = tl.load(other_lse + head.to(tl.int64) * rows + number, mask=real, other=0.0)
    top = tl.maximum(one, two)
    both = top + tl.log(tl.exp(one - top) + tl.exp(two - top))
    place = (row * HEADS + head)[:, None] * SIZE + at[None, :]
    from_there = (tl.cast(number, tl.int64) * HEADS + head)[:, None] * SIZE + at[None, :]
    own = tl.load(out + place, mask=mine, other=0.0).to(tl.float32)
    new = tl.load(other + from_there, mask=mine, other=0.0).to(tl.float32)
    result = own * tl.exp(one - both)[:, None] + new * tl.exp(two - both)[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mine)
    tl.store(joined + head.to(tl.int64) * all_rows + row, both, mask=real)


@triton.jit
def add_rows(target, source, index, columns, BLOCK: tl.constexpr) -> None:
    """Add row r of `source` to row `index[r]` of `target`; the indices are unique."""
    number = tl.program_id(0)
    row = tl.load(index + number)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    place = target + row * columns + at
    before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    more = tl.load(source + tl.cast(number, tl.int64) * columns + at, mask=inside, other=0.0)
    tl.store(place, (before + more.to(tl.float32)).to(target.dtype.element_ty), mask=inside)
