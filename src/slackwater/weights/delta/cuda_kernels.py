"""Triton kernels of the delta codec: compare, compact, write."""

# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def keyed_term(word, key):
    """What a word adds to its chunk's checksum."""
    low = (word + key) & 0xFFFFFFFF
    high = ((word >> 32) + (key >> 32)) & 0xFFFFFFFF
    return word + low * high


@triton.jit
def differing_bits(differ, columns, PER: tl.constexpr):
    """Rows of words, two versions' difference: a bit per element that is not zero, 32 to the row."""
    # The top bit of each element of `some` says whether it differs; a product brings those bits together.
    if PER == 8:
        some = ((differ & 0x7F7F7F7F7F7F7F7F) + 0x7F7F7F7F7F7F7F7F) | differ
        bits = (((some >> 7) & 0x0101010101010101) * 0x0102040810204080) >> 56
    elif PER == 4:
        some = ((differ & 0x7FFF7FFF7FFF7FFF) + 0x7FFF7FFF7FFF7FFF) | differ
        bits = (((some >> 15) & 0x0001000100010001) * 0x0001000200040008) >> 48
    else:
        bits = ((differ & 0xFFFFFFFF) != 0).to(tl.int64) + ((differ >> 32) != 0).to(tl.int64) * 2
    bits = bits.to(tl.int32) & ((1 << PER) - 1)
    return tl.sum(bits << (columns[None, :] * PER), 1)


@triton.jit
def compare(
    old, new, keys, factors, masks, counts, sums, words,
    PER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPARE: tl.constexpr,
):  # fmt: skip
    """A tile: its changed elements as bits, how many they are, and what it adds to the checksum of the new."""
    tile = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = rows[:, None] * COLUMNS + columns[None, :]
    places = tile * (ROWS * COLUMNS) + inside
    there = places < words
    fresh = tl.load(new + places, mask=there, other=0)
    key = tl.load(keys + inside % 512)
    term = tl.where(there, keyed_term(fresh, key), 0)
    chunk = (tile * (ROWS * COLUMNS) + rows * COLUMNS) // 512
    factor = tl.load(factors + chunk, mask=chunk * 512 < words, other=0)
    tl.store(sums + tile, tl.sum(tl.sum(term, 1) * factor, 0))
    if COMPARE:
        was = tl.load(old + places, mask=there, other=0)
        differ = fresh ^ was
        packed = differing_bits(differ, columns, PER)
        tl.store(masks + tile * ROWS + rows, packed)
        tl.store(counts + tile, tl.sum(libdevice.popc(packed), 0))


@triton.jit
def compact(
    old, new, masks, dense, starts, places, ours, theirs, elements,
    ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A tile's changed places within their block, and the new and old elements there."""
    tile = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, ROWS)
    first = (tile * ROWS + rows) * 32
    bits = tl.load(masks + tile * ROWS + rows)
    if tl.load(dense + tile // TILES):
        left = tl.minimum(tl.maximum(elements - first, 0), 32)
        bits = tl.where(left == 32, -1, ((1 << left) - 1).to(tl.int32))
    count = libdevice.popc(bits)
    out = tl.load(starts + tile) + (tl.cumsum(count, 0) - count)
    in_block = (tile % TILES).to(tl.int32) * (ROWS * 32) + rows * 32
    while tl.max((bits != 0).to(tl.int32), 0) > 0:
        some = bits != 0
        bit = libdevice.ffs(bits) - 1
        tl.store(places + out, (in_block + bit).to(tl.int16), mask=some)
        tl.store(ours + out, tl.load(new + first + bit, mask=some), mask=some)
        tl.store(theirs + out, tl.load(old + first + bit, mask=some), mask=some)
        bits = bits & (bits - 1)
        out += some.to(tl.int64)


@triton.jit
def write_blocks(
    part, places, starts, values,
    BLOCK: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr, KEEP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A block's new elements into place; with KEEP the old ones are left in `values`."""
    block = tl.program_id(0).to(tl.int64)
    first, stop = tl.load(starts + block), tl.load(starts + block + 1)
    for begin in range(first, stop, LANES):
        index = begin + tl.arange(0, LANES)
        here = index < stop
        place = tl.load(places + index, mask=here, other=0).to(tl.int64) & 0xFFFF
        value = tl.load(values + index, mask=here, other=0)
        target = part + block * BLOCK + place
        if STEP or KEEP:
            was = tl.load(target, mask=here, other=0)
        if STEP:
            sent = value.to(tl.int64) & ((1 << BITS) - 1)
            value = (was.to(tl.int64) + ((sent >> 1) ^ -(sent & 1))).to(was.dtype)
        tl.store(target, value, mask=here)
        if KEEP:
            tl.store(values + index, was, mask=here)
