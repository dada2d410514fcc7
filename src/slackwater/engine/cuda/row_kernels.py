"""Triton kernels over rows: norm, rotation, activation, adapters' second factors, sampling.

If a batch has adapters, a row of a product holds its outputs and, behind them, its low-rank states
by unit of 16 ranks. The kernel that reads the outputs multiplies the states by the second factor
(`spread`, `[units, outputs, 16]`) and adds the result; it reads the factors of an adapter's first
PRELOADED units before its predecessor has ended. A product may come in parts (`[parts, rows,
columns]`), which are added up first. Rows that share an adapter form tiles: first row, rows, first
unit, units, scale (a float's bits).
"""

# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

import triton
import triton.language as tl

from slackwater.engine.cuda.early_start import let_successor_start, wait_for_predecessor


@triton.jit
def _sum_parts(place, stride, mask, PARTS: tl.constexpr):
    """The sum of a product's parts, in fp32."""
    total = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(place + part * stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _norm_row(
    x, residual, weight, out, columns, part_stride, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
) -> None:  # fmt: skip
    kind = out.dtype.element_ty
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = _sum_parts(x + at, part_stride, inside, PARTS)
    if ADD:
        before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        total = (value + before).to(kind)
        tl.store(residual + at, total, mask=inside)
        value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / columns + eps)
    normed = (value * scale).to(kind).to(tl.float32)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (normed * factor).to(kind), mask=inside)


@triton.jit
def _norm_adapted_row(
    x, residual, weight, out, spread, first, units, strength, columns, part_stride, eps,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
) -> None:  # fmt: skip
    kind = out.dtype.element_ty
    k = tl.arange(0, 16)
    c = tl.arange(0, CHUNK)
    power = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, columns, CHUNK):
        at = start + c
        inside = at < columns
        update = tl.zeros((CHUNK,), tl.float32)
        for unit in range(first, first + units):
            state = _sum_parts(x + columns + unit * 16 + k, part_stride, k < 16, PARTS)
            state = state.to(kind).to(tl.float32)
            place = (unit * columns + at).to(tl.int64)[:, None] * 16 + k[None, :]
            factors = tl.load(spread + place, mask=inside[:, None], other=0.0)
            update += tl.sum(factors.to(tl.float32) * state[None, :], axis=1)
        value = _sum_parts(x + at, part_stride, inside, PARTS)
        value = (value + strength * update.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        total = (value + before).to(kind)
        tl.store(residual + at, total, mask=inside)
        value = total.to(tl.float32)
        power += value * value
    scale = tl.rsqrt(tl.sum(power, axis=0) / columns + eps)
    tl.debug_barrier()  # the sums are read again, by threads that did not write them
    for start in range(0, columns, CHUNK):
        at = start + c
        inside = at < columns
        total = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        normed = (total * scale).to(kind).to(tl.float32)
        factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, (normed * factor).to(kind), mask=inside)


@triton.jit
def norm_kernel(
    x, residual, weight, out, spread, adapted, x_stride, part_stride, columns, eps,
    ADD: tl.constexpr, ADAPT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Root-mean-square norm of a row; with ADD, of `residual += x`, x with its adapter's update.

    `adapted` holds per row: first unit, units, scale.
    """
    if EARLY:
        let_successor_start()
        wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    residual += row * columns
    out += row * columns
    if ADAPT:
        units = tl.load(adapted + row * 3 + 1)
        if units == 0:
            _norm_row(x, residual, weight, out, columns, part_stride, eps, ADD, BLOCK, PARTS)
        else:
            first = tl.load(adapted + row * 3)
            strength = tl.load(adapted + row * 3 + 2).to(tl.float32, bitcast=True)
            _norm_adapted_row(
                x, residual, weight, out, spread, first, units, strength, columns, part_stride,
                eps, CHUNK, PARTS,
            )  # fmt: skip
    else:
        _norm_row(x, residual, weight, out, columns, part_stride, eps, ADD, BLOCK, PARTS)


# Specialized numbers would mean a compilation for each kind.
@triton.jit(do_not_specialize=["rows", "layer", "table_stride"])
def rotate_kernel(  # noqa: C901  (branches of compile-time constants)
    qkv, cos, sin, q_norm, k_norm, q, cache, tables, slots, positions, spread, tiles,
    rows, layer, row_stride, part_stride, table_stride, block_stride, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
    NORM: tl.constexpr, ADAPT: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    PRELOADED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One head of a tile of rows: add the adapter's update, norm and rotate q and k, cache k and v.

    Program 1 counts heads: HEADS queries, then KV keys, then KV values. In order: read second
    factors early, wait for the predecessor, add up the product's parts, add the low-rank update,
    norm, rotate, and store to `q` or to the cache.
    """
    if EARLY:
        let_successor_start()
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = tile * ROWS
    count = tl.minimum(rows - first, ROWS)
    half: tl.constexpr = D // 2
    kind = q.dtype.element_ty
    r = tl.arange(0, ROWS)
    at = tl.arange(0, half)
    if ADAPT:
        first = tl.load(tiles + tile * 5)
        count = tl.load(tiles + tile * 5 + 1)
        first_unit = tl.load(tiles + tile * 5 + 2)
        units = tl.load(tiles + tile * 5 + 3)
        strength = tl.load(tiles + tile * 5 + 4).to(tl.float32, bitcast=True)
        part = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV).to(tl.int32)
        width: tl.constexpr = (HEADS + 2 * KV) * D
        k = tl.arange(0, 16)
        preloaded = ()
        for ahead in tl.static_range(PRELOADED):  # no kernel of the step writes second factors
            columns = ((first_unit + ahead) * width + head * D + at).to(tl.int64)
            factor = spread + columns[None, :] * 16 + k[:, None]
            preloaded = preloaded + (  # noqa: RUF005
                tl.load(factor, mask=ahead < units, other=0.0),
                tl.load(factor + half * 16, mask=ahead < units, other=0.0),
            )
    if EARLY:
        wait_for_predecessor()
    if count <= 0:
        return
    in_tile = r < count
    row = (first + r).to(tl.int64)
    source = qkv + row[:, None] * row_stride
    low = _sum_parts(source + head * D + at[None, :], part_stride, in_tile[:, None], PARTS)
    high = _sum_parts(source + head * D + half + at[None, :], part_stride, in_tile[:, None], PARTS)
    if ADAPT:
        low_sum = tl.zeros((ROWS, half), tl.float32)
        high_sum = tl.zeros((ROWS, half), tl.float32)
        for ahead in tl.static_range(PRELOADED):
            place = width + ((first_unit + ahead) * 3 + part) * 16
            there = in_tile[:, None] & (ahead < units)
            state = _sum_parts(source + place + k[None, :], part_stride, there, PARTS).to(kind)
            low_sum += tl.dot(state, preloaded[2 * ahead])
            high_sum += tl.dot(state, preloaded[2 * ahead + 1])
        for unit in range(first_unit + PRELOADED, first_unit + units):
            place = width + (unit * 3 + part) * 16
            state = _sum_parts(
                source + place + k[None, :], part_stride, in_tile[:, None], PARTS
            ).to(kind)
            columns = (unit * width + head * D + at).to(tl.int64)
            factor = spread + columns[None, :] * 16 + k[:, None]
            low_sum += tl.dot(state, tl.load(factor))
            high_sum += tl.dot(state, tl.load(factor + half * 16))
        low = (low + strength * low_sum.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        high = (high + strength * high_sum.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    position = tl.load(positions + row, mask=in_tile, other=0)
    if head < HEADS + KV:
        if NORM:
            weight = q_norm
            if head >= HEADS:
                weight = k_norm
            power = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
            scale = tl.rsqrt(power / D + eps)[:, None]
            low = (low * scale).to(kind).to(tl.float32)
            high = (high * scale).to(kind).to(tl.float32)
            low = (low * tl.load(weight + at)[None, :].to(tl.float32)).to(kind).to(tl.float32)
            high = (high * tl.load(weight + half + at)[None, :].to(tl.float32)).to(kind)
            high = high.to(tl.float32)
        angle = position.to(tl.int64)[:, None] * half + at[None, :]
        c = tl.load(cos + angle, mask=in_tile[:, None], other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=in_tile[:, None], other=0.0).to(tl.float32)
        turned = low * c - high * s
        high = high * c + low * s
        low = turned
    if head < HEADS:
        target = q + (row * HEADS + head)[:, None] * D + at[None, :]
        tl.store(target, low.to(kind), mask=in_tile[:, None])
        tl.store(target + half, high.to(kind), mask=in_tile[:, None])
    else:
        slot = tl.load(slots + row, mask=in_tile, other=0).to(tl.int64)
        block = tl.load(tables + slot * table_stride + position // TOKENS, mask=in_tile, other=0)
        base = block.to(tl.int64) * block_stride + (position % TOKENS) * D
        base += (layer * 2 * KV + head - HEADS).to(tl.int64) * (TOKENS * D)
        target = cache + base[:, None] + at[None, :]
        tl.store(target, low.to(kind), mask=in_tile[:, None])
        tl.store(target + half, high.to(kind), mask=in_tile[:, None])


@triton.jit(do_not_specialize=["rows"])  # else a compilation for numbers of another kind
def silu_mul_kernel(
    gate_up, out, spread, tiles, rows, columns, row_stride, part_stride,
    ADAPT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    PRELOADED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """`silu(gate) * up` of a tile of rows that hold both side by side."""
    if EARLY:
        let_successor_start()
    tile = tl.program_id(0)
    first = tile * ROWS
    count = tl.minimum(rows - first, ROWS)
    kind = out.dtype.element_ty
    r = tl.arange(0, ROWS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if ADAPT:
        first = tl.load(tiles + tile * 5)
        count = tl.load(tiles + tile * 5 + 1)
        first_unit = tl.load(tiles + tile * 5 + 2)
        units = tl.load(tiles + tile * 5 + 3)
        strength = tl.load(tiles + tile * 5 + 4).to(tl.float32, bitcast=True)
        k = tl.arange(0, 16)
        inside = (at < columns)[None, :]
        preloaded = ()
        for ahead in tl.static_range(PRELOADED):  # no kernel of the step writes second factors
            line = ((first_unit + ahead) * 2 * columns + at).to(tl.int64)
            factor = spread + line[None, :] * 16 + k[:, None]
            there = inside & (ahead < units)
            preloaded = preloaded + (  # noqa: RUF005
                tl.load(factor, mask=there, other=0.0),
                tl.load(factor + columns * 16, mask=there, other=0.0),
            )
    if EARLY:
        wait_for_predecessor()
    if count <= 0:
        return
    row = (first + r).to(tl.int64)
    in_tile = r < count
    mask = in_tile[:, None] & (at < columns)[None, :]
    source = gate_up + row[:, None] * row_stride
    gate = _sum_parts(source + at[None, :], part_stride, mask, PARTS)
    up = _sum_parts(source + columns + at[None, :], part_stride, mask, PARTS)
    if ADAPT:
        gate_sum = tl.zeros((ROWS, BLOCK), tl.float32)
        up_sum = tl.zeros((ROWS, BLOCK), tl.float32)
        for ahead in tl.static_range(PRELOADED):
            states = source + 2 * columns + (first_unit + ahead) * 32 + k[None, :]
            there = in_tile[:, None] & (ahead < units)
            gate_sum += tl.dot(
                _sum_parts(states, part_stride, there, PARTS).to(kind), preloaded[2 * ahead]
            )
            states += 16
            up_sum += tl.dot(
                _sum_parts(states, part_stride, there, PARTS).to(kind), preloaded[2 * ahead + 1]
            )
        for unit in range(first_unit + PRELOADED, first_unit + units):
            place = 2 * columns + unit * 32
            states = source + place + k[None, :]
            one = _sum_parts(states, part_stride, in_tile[:, None], PARTS).to(kind)
            other = _sum_parts(states + 16, part_stride, in_tile[:, None], PARTS).to(kind)
            line = (unit * 2 * columns + at).to(tl.int64)
            factor = spread + line[None, :] * 16 + k[:, None]
            gate_sum += tl.dot(one, tl.load(factor, mask=inside, other=0.0))
            up_sum += tl.dot(other, tl.load(factor + columns * 16, mask=inside, other=0.0))
        gate = (gate + strength * gate_sum.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        up = (up + strength * up_sum.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind)
    result = (active.to(tl.float32) * up).to(kind)
    tl.store(out + row[:, None] * columns + at[None, :], result, mask=mask)


@triton.jit
def spread_kernel(
    y, spread, tiles, row_stride, start, columns, width, states, step,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Add the adapters' update to columns `[start, start + columns)` of a product, in place.

    The product has `width` outputs; unit u's states for these columns begin at `states + u * step`.
    """
    tile = tl.program_id(0)
    count = tl.load(tiles + tile * 5 + 1)
    units = tl.load(tiles + tile * 5 + 3)
    if (count <= 0) | (units <= 0):
        return
    first = tl.load(tiles + tile * 5)
    first_unit = tl.load(tiles + tile * 5 + 2)
    strength = tl.load(tiles + tile * 5 + 4).to(tl.float32, bitcast=True)
    kind = y.dtype.element_ty
    r = tl.arange(0, ROWS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, 16)
    row = (first + r).to(tl.int64)
    in_tile = (r < count)[:, None]
    inside = (at < columns)[None, :]
    source = y + row[:, None] * row_stride
    update = tl.zeros((ROWS, BLOCK), tl.float32)
    for unit in range(first_unit, first_unit + units):
        state = tl.load(source + states + unit * step + k[None, :], mask=in_tile, other=0.0)
        line = (unit * width + start + at).to(tl.int64)
        factor = tl.load(spread + line[None, :] * 16 + k[:, None], mask=inside, other=0.0)
        update += tl.dot(state, factor)
    target = source + start + at[None, :]
    value = tl.load(target, mask=in_tile & inside, other=0.0).to(tl.float32)
    value = (value + strength * update.to(kind).to(tl.float32)).to(kind)
    tl.store(target, value, mask=in_tile & inside)


@triton.jit
def chunk_kernel(
    logits, temperature, tops, sums, places, row_stride, vocab, chunks,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Of one chunk of a row's logits: the largest, its index, and the sum of relative weights."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    requested = tl.load(temperature + row)
    heat = tl.where(requested > 0, requested, 1.0)
    value = tl.load(logits + row * row_stride + at, mask=at < vocab, other=float("-inf"))
    value = value.to(tl.float32)
    top = tl.max(value, axis=0)
    here = tl.argmax(value, axis=0)
    against = tl.where(top == float("-inf"), 0.0, top)  # -inf: every token here is masked
    weight = tl.exp((value - against) / heat)
    tl.store(tops + row * chunks + chunk, top)
    tl.store(sums + row * chunks + chunk, tl.sum(weight, axis=0))
    tl.store(places + row * chunks + chunk, (chunk * BLOCK + here).to(tl.int32))


@triton.jit
def sample_kernel(
    logits, temperature, uniform, tops, sums, places, tokens, logprobs, row_stride, vocab, chunks,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """One token of a row by the inverse of its distribution, or the likeliest at temperature 0."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    there = c < chunks
    requested = tl.load(temperature + row)
    heat = tl.where(requested > 0, requested, 1.0)
    top = tl.load(tops + row * chunks + c, mask=there, other=float("-inf"))
    weight = tl.load(sums + row * chunks + c, mask=there, other=0.0)
    place = tl.load(places + row * chunks + c, mask=there, other=2147483647)
    best = tl.max(top, axis=0)
    likeliest = tl.min(tl.where(top == best, place, 2147483647), axis=0)
    weight = weight * tl.exp((top - best) / heat)
    upto = tl.cumsum(weight, axis=0)
    total = tl.sum(weight, axis=0)
    aim = tl.load(uniform + row) * total
    chunk = tl.minimum(tl.sum(((upto <= aim) & there).to(tl.int32), axis=0), chunks - 1)
    before = tl.sum(tl.where(c == chunk, upto - weight, 0.0), axis=0)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * row_stride + at, mask=at < vocab, other=float("-inf"))
    inside = tl.exp((value.to(tl.float32) - best) / heat)
    running = before + tl.cumsum(inside, axis=0)
    passed = tl.sum(((running <= aim) & (at < vocab)).to(tl.int32), axis=0)
    drawn = tl.minimum(chunk * BLOCK + tl.minimum(passed, BLOCK - 1), vocab - 1)
    token = tl.where(requested > 0, drawn, likeliest).to(tl.int32)
    chosen = tl.load(logits + row * row_stride + token).to(tl.float32)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, (chosen - best) / heat - tl.log(total))
