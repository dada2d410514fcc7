"""Decodes which elements a frame changes; refuses inconsistent streams.

Rice code of g with parameter k: the low k bits of all numbers, packed and padded to a byte; then,
for each number, g >> k zeros and a one, packed likewise. Bits fill a byte from the lowest up.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slackwater.weights.delta.compiled import (
    compile_loop,
    count_ones,
    load_word,
    store_word,
    trailing_zeros,
)
from slackwater.weights.delta.frame import BLOCK, DeltaFrame, IndexEncoding, delta_error

_NONE, _DENSE, _BITMAP, _GAPS, _RUNS = map(int, IndexEncoding)

_MAX_K = 15
_ONE = np.uint64(1)


@compile_loop
def best_k(numbers: Any, count: Any) -> Any:
    """A near-optimal Rice parameter, the smallest of equals, and the bits of its unary part."""
    total = np.int64(0)
    for i in range(count):
        total += numbers[i]
    longest = 0
    while longest < _MAX_K and (total // count) >> longest:
        longest += 1
    best, best_bytes, best_unary = 0, np.int64(1) << 60, np.int64(0)
    for k in range(max(longest - 2, 0), longest + 1):
        unary = np.int64(count)
        for i in range(count):
            unary += numbers[i] >> k
        size = (count * k + 7) // 8 + (unary + 7) // 8
        if size < best_bytes:
            best, best_bytes, best_unary = k, size, unary
    return best, best_unary


@compile_loop
def write_low(numbers: Any, count: Any, k: Any, out: Any, at: Any) -> Any:
    """Append the low bits at byte `at`; the next free byte. Overwrites up to 8 bytes beyond."""
    base, mask = np.uintp(out.ctypes.data) + np.uintp(at), (_ONE << np.uint64(k)) - _ONE
    held, bits, done = np.uint64(0), 0, 0
    for i in range(count):
        held |= (np.uint64(numbers[i]) & mask) << np.uint64(bits)
        bits += k
        if bits >= 32:
            store_word(base + np.uintp(done), held)
            done += 4
            held >>= np.uint64(32)
            bits -= 32
    store_word(base + np.uintp(done), held)
    return at + done + (bits + 7) // 8


@compile_loop
def write_unary(numbers: Any, count: Any, k: Any, out: Any, at: Any) -> Any:
    """Append the unary part of each number; the next free byte."""
    base = np.uintp(out.ctypes.data) + np.uintp(at)
    held, bits, done = np.uint64(0), 0, 0
    for i in range(count):
        bits += numbers[i] >> k
        while bits >= 64:
            store_word(base + np.uintp(done), held)
            done += 8
            held = np.uint64(0)
            bits -= 64
        held |= _ONE << np.uint64(bits)
        bits += 1
    if bits:
        store_word(base + np.uintp(done), held)
    return at + done + (bits + 7) // 8


@compile_loop
def read_numbers(data: Any, low: Any, unary: Any, end: Any, count: Any, k: Any, out: Any) -> Any:
    """Read `count` numbers: low bits from `low`, unary part from `unary` to `end`; False if
    invalid.

    Invalid: a number above 65535, unused bytes, or non-zero padding. `data` must have 8 bytes
    beyond.
    """
    base, mask = np.uintp(data.ctypes.data), (_ONE << np.uint64(k)) - _ONE
    lows, bit = base + np.uintp(low), 0
    word, have, zeros = np.uint64(0), 0, 0
    for i in range(count):
        while word == 0:
            zeros += have
            if unary >= end or zeros > 65535:
                return False
            word, have = load_word(base + np.uintp(unary)), 64
            if end - unary < 8:
                have = (end - unary) * 8
                word &= (_ONE << np.uint64(have)) - _ONE
            unary += 8
        skipped = trailing_zeros(word)
        word = (word >> np.uint64(skipped)) >> _ONE
        have -= skipped + 1
        held = load_word(lows + np.uintp(bit >> 3)) >> np.uint64(bit & 7)
        number = (np.int64(zeros + skipped) << k) | np.int64(held & mask)
        bit += k
        zeros = 0
        if number > 65535:
            return False
        out[i] = number
    if bit & 7 and data[low + (bit >> 3)] >> (bit & 7):
        return False
    return word == 0 and have < 8 and unary >= end


@compile_loop
def set_bits(words: Any, stop: Any, out: Any) -> Any:
    """Write the positions of the set bits in `words[:stop]`; returns their number."""
    count = 0
    for index in range(stop):
        word = words[index]
        base = index * 64
        while word != 0:
            out[count] = base + trailing_zeros(word)
            count += 1
            word &= word - _ONE
    return count


def block_places(frame: DeltaFrame) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Changed places within their blocks, indexed like the values, and block starts.

    `starts[b]` is block b's first value, the last entry the number of values. Dense blocks are not
    filled in.
    """
    kinds = np.frombuffer(frame.kinds, "<u2")
    blocks = -(-frame.elements // BLOCK)
    if len(kinds) != blocks or len(frame.sizes) % 2:
        raise delta_error(f"it names the kinds of {len(kinds)} blocks, not of {blocks}")
    sizes = np.frombuffer(frame.sizes, "<u2")
    bits = np.zeros(len(frame.positions) + 8, np.uint8)  # padded: reads are a word wide
    bits[:-8] = np.frombuffer(frame.positions, np.uint8)
    starts = np.empty(blocks + 1, np.int64)
    count = int(_count_values(kinds, sizes, bits, frame.elements, starts))
    if count < 0 or any(len(plane) != count for plane in frame.planes):
        raise delta_error("its blocks and its streams do not fit together")
    places = np.empty(count, np.uint16)
    if not _fill_places(kinds, sizes, bits, frame.elements, starts, places):
        raise delta_error("a block's positions are damaged")
    return places, starts


@compile_loop
def _count_values(kinds: Any, sizes: Any, bits: Any, elements: Any, starts: Any) -> Any:
    """Fill in where each block's values start; the number of values, or -1 if inconsistent."""
    end: Any = bits.size - 8
    sized: Any = 0
    at: Any = 0
    values: Any = 0
    for block in range(kinds.size):
        kind, size = kinds[block] & 7, min(elements - block * BLOCK, BLOCK)
        starts[block] = values
        count, used, read = np.int64(0), np.int64(0), 0
        if (kind < _GAPS and kinds[block] > 7) or (kind == _GAPS and kinds[block] > 255):
            return -1
        if kind == _DENSE:
            count = np.int64(size)
        elif kind == _BITMAP:
            used = np.int64((size + 7) // 8)
            for byte in range(at, min(at + used, end)):
                count += count_ones(np.uint64(bits[byte]))
        elif kind == _GAPS:
            read = 2
            count, used = _gaps_size(kinds[block], sizes, sized)
        elif kind == _RUNS:
            read = 3
            count, used = _runs_size(kinds[block], sizes, sized, bits, at)
        elif kind != _NONE:
            return -1
        sized, at = sized + read, at + used
        if count < 0 or count > size or at > end:
            return -1
        values += count
    starts[kinds.size] = values
    return values if sized == sizes.size and at == end else -1


@compile_loop
def _gaps_size(kind: Any, sizes: Any, sized: Any) -> Any:
    """Number of changes and position bytes of a gap block; a negative count if inconsistent."""
    k = np.int64((kind >> 3) & 31)
    if sized + 2 > sizes.size or k > 15:
        return np.int64(-1), np.int64(0)
    count = np.int64(sizes[sized]) + 1
    return count, (count * k + 7) // 8 + np.int64(sizes[sized + 1])


@compile_loop
def _run_sections(kind: Any, sizes: Any, sized: Any, at: Any) -> Any:
    """The ends of a run block's sections: low bits of gaps and lengths, then the rest of each."""
    k, length_k = np.int64((kind >> 3) & 31), np.int64(kind >> 8)
    runs = np.int64(sizes[sized]) + 1
    one = at + (runs * k + 7) // 8
    two = one + (runs * length_k + 7) // 8
    three = two + np.int64(sizes[sized + 1])
    return one, two, three, three + np.int64(sizes[sized + 2])


@compile_loop
def _runs_size(kind: Any, sizes: Any, sized: Any, bits: Any, at: Any) -> Any:
    """Number of changes and position bytes of a run block; a negative count if inconsistent."""
    bad = np.int64(-1), np.int64(0)
    if sized + 3 > sizes.size or ((kind >> 3) & 31) > 15 or (kind >> 8) > 15:
        return bad
    runs = np.int64(sizes[sized]) + 1
    one, _, three, end = _run_sections(kind, sizes, sized, at)
    if end > bits.size - 8:
        return bad
    lengths = np.empty(runs, np.int32)
    if not read_numbers(bits, one, three, end, runs, np.int64(kind >> 8), lengths):
        return bad
    count = runs
    for i in range(runs):
        count += lengths[i]
    return count, end - at


@compile_loop
def _fill_places(kinds: Any, sizes: Any, bits: Any, elements: Any, starts: Any, places: Any) -> Any:
    """Fill in the places of all blocks except dense ones; False if any is outside its block."""
    sized: Any = 0
    at: Any = 0
    gaps, lengths = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    for block in range(kinds.size):
        kind, size = kinds[block] & 7, min(elements - block * BLOCK, BLOCK)
        out, stop = starts[block], starts[block + 1]
        valid = True
        if kind == _BITMAP:
            valid = _place_bitmap(bits, at, size, places, out)
            at += (size + 7) // 8
        elif kind == _GAPS:
            k = np.int64((kinds[block] >> 3) & 31)
            unary = at + ((stop - out) * k + 7) // 8
            end = unary + np.int64(sizes[sized + 1])
            valid = read_numbers(bits, at, unary, end, stop - out, k, gaps)
            valid = valid and _place_gaps(gaps, stop - out, size, places, out)
            at, sized = end, sized + 2
        elif kind == _RUNS:
            one, two, three, end = _run_sections(kinds[block], sizes, sized, at)
            runs, k = np.int64(sizes[sized]) + 1, np.int64((kinds[block] >> 3) & 31)
            valid = read_numbers(bits, at, two, three, runs, k, gaps)
            valid = valid and read_numbers(
                bits, one, three, end, runs, np.int64(kinds[block] >> 8), lengths
            )
            valid = valid and _place_runs(gaps, lengths, runs, size, places, out)
            at, sized = end, sized + 3
        if not valid:
            return False
    return True


@compile_loop
def _place_bitmap(bits: Any, at: Any, size: Any, places: Any, out: Any) -> Any:
    for byte in range((size + 7) // 8):
        held = bits[at + byte]
        for bit in range(8):
            if held >> bit & 1:
                if byte * 8 + bit >= size:
                    return False
                places[out] = byte * 8 + bit
                out += 1
    return True


@compile_loop
def _place_gaps(gaps: Any, count: Any, size: Any, places: Any, out: Any) -> Any:
    place = np.int64(-1)
    for i in range(count):
        place += np.int64(gaps[i]) + 1
        if place >= size:
            return False
        places[out + i] = place
    return True


@compile_loop
def _place_runs(gaps: Any, lengths: Any, runs: Any, size: Any, places: Any, out: Any) -> Any:
    place = np.int64(0)
    for run in range(runs):
        place += gaps[run]
        if place + lengths[run] >= size:
            return False
        for _ in range(lengths[run] + 1):
            places[out] = place
            out, place = out + 1, place + 1
    return True
