"""Encodes the difference between two versions of a part as a frame."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slackwater.model.errors import ConfigError
from slackwater.weights.delta.checksum import (
    CHUNK_WORDS,
    KEYS,
    factor_of,
    range_sum,
    sum_of_size,
    term_of,
    word_of,
)
from slackwater.weights.delta.compiled import (
    compile_loop,
    count_ones,
    differing_bytes,
    differing_shorts,
    differing_words,
)
from slackwater.weights.delta.frame import (
    BITMAP_BYTES,
    BLOCK,
    DeltaFrame,
    IndexEncoding,
    ValueEncoding,
    pack,
)
from slackwater.weights.delta.places import best_k, set_bits, write_low, write_unary

Elements: TypeAlias = NDArray[Any]  # one dimension of uint8, uint16 or uint32
_NONE, _DENSE, _BITMAP, _GAPS, _RUNS = map(int, IndexEncoding)
_SAMPLE = 1 << 14


def encode(old: Elements, new: Elements) -> bytes:
    """The frame that makes `new` out of `old`: arrays of one length, of uint8, uint16 or uint32."""
    return pack(difference(old, new))


def difference(old: Elements, new: Elements) -> DeltaFrame:
    if old.dtype != new.dtype or old.shape != new.shape or new.ndim != 1:
        raise ConfigError.of("delta base", (old.dtype, old.shape), f"must be as {new.shape}")
    item, elements = new.dtype.itemsize, new.size
    blocks = -(-elements // BLOCK)
    kinds, sizes = np.empty(blocks, np.uint16), np.empty(blocks * 3, np.uint16)
    positions = np.empty(blocks * BITMAP_BYTES + 64, np.uint8)
    new_values, old_values = np.empty(elements, new.dtype), np.empty(elements, new.dtype)
    old_bytes, new_bytes = old.view(np.uint8), new.view(np.uint8)
    found = _compare_blocks(
        old, new, old_bytes, new_bytes, kinds, sizes, positions, new_values, old_values, KEYS
    )
    sized, positioned, values, change, total = (int(each) for each in found)
    new_values, old_values = new_values[:values], old_values[:values]
    form, planes = value_planes(new_values, old_values)
    return DeltaFrame(
        item,
        form,
        elements,
        (total - change) & ((1 << 64) - 1),
        total,
        kinds.tobytes(),
        sizes[:sized].tobytes(),
        positions[:positioned].tobytes(),
        planes,
    )


def value_planes(new: Elements, old: Elements) -> tuple[ValueEncoding, tuple[bytes, ...]]:
    """The changed values in the encoding that looks smaller, split into planes of one byte each."""
    item = new.dtype.itemsize
    step = max(len(new) // _SAMPLE, 1)
    sampled_new, sampled_old = new[::step][:_SAMPLE].copy(), old[::step][:_SAMPLE].copy()
    as_elements = entropy_bits(sampled_new)
    as_steps = entropy_bits(steps(sampled_new, sampled_old))
    form = ValueEncoding.STEP if as_steps < as_elements else ValueEncoding.ELEMENT
    values = steps(new, old) if form is ValueEncoding.STEP else new
    cut = values.view(np.uint8).reshape(-1, item)
    return form, tuple(cut[:, byte].tobytes() for byte in range(item))


def steps(new: Elements, old: Elements) -> Elements:
    """The differences as zigzag-coded integers of the same width, small ones first."""
    signed = (new - old).view(np.dtype(f"i{new.dtype.itemsize}"))
    bits = new.dtype.itemsize * 8
    return ((signed << 1) ^ (signed >> (bits - 1))).view(new.dtype)


def entropy_bits(values: Elements) -> float:
    """The sum of the byte planes' entropies: the bound of an entropy coder."""
    if not len(values):
        return 0.0
    cut = values.view(np.uint8).reshape(len(values), -1)
    bits = 0.0
    for byte in range(cut.shape[1]):
        counts = np.bincount(cut[:, byte], minlength=256)
        shares = counts[counts > 0] / len(values)
        bits -= float((shares * np.log2(shares)).sum())
    return bits


@compile_loop
def _compare_blocks(
    old: Any,
    new: Any,
    old_bytes: Any,
    new_bytes: Any,
    kinds: Any,
    sizes: Any,
    positions: Any,
    new_values: Any,
    old_values: Any,
    keys: Any,
) -> Any:
    """One pass over both versions, block by block: find changes, encode positions, collect values.

    Returns the used lengths of `sizes`, `positions` and values, the checksum's change, and the new
    checksum.
    """
    item = new.itemsize
    words = np.empty(BLOCK // 64, np.uint64)
    places = np.empty(BLOCK, np.int32)
    gaps, lengths = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    sized, at, values = 0, 0, 0
    moved, total = np.uint64(0), sum_of_size(new_bytes.size)
    for block in range(kinds.size):
        start = block * BLOCK
        size = min(new.size - start, BLOCK)
        count = mark_changes(old, new, start, size, words)
        block_sum = range_sum(new_bytes, start * item, (start + size) * item, keys)
        total += block_sum
        if count == 0:
            kinds[block] = _NONE
            continue
        kind, sized, at = write_positions(
            words, size, count, item, sizes, sized, positions, at, places, gaps, lengths
        )
        kinds[block] = kind
        if kind == _DENSE:
            # Element by element: slice copies take numba seconds longer to compile.
            for i in range(size):
                new_values[values + i], old_values[values + i] = new[start + i], old[start + i]
            values += size
            moved += block_sum
            moved -= range_sum(old_bytes, start * item, (start + size) * item, keys)
        else:
            moved += _collect_changes(
                old,
                new,
                old_bytes,
                new_bytes,
                start,
                places,
                count,
                new_values,
                old_values,
                values,
                keys,
            )
            values += count
    return sized, at, values, moved, total


@compile_loop
def mark_changes(old: Any, new: Any, start: int, size: int, words: Any) -> Any:
    """Set a bit for each differing element of a block; returns their number."""
    item, count = new.itemsize, 0
    one = np.uintp(old.ctypes.data) + np.uintp(start * item)
    other = np.uintp(new.ctypes.data) + np.uintp(start * item)
    for word in range(size // 64):
        offset = np.uintp(word * 64 * item)
        if item == 1:
            bits = differing_bytes(one + offset, other + offset)
        elif item == 2:
            bits = differing_shorts(one + offset, other + offset)
        else:
            bits = differing_words(one + offset, other + offset)
        words[word] = bits
        count += count_ones(bits)
    if size % 64:
        bits = np.uint64(0)
        first = start + size // 64 * 64
        for place in range(size % 64):
            if old[first + place] != new[first + place]:
                bits |= np.uint64(1) << np.uint64(place)
        words[size // 64] = bits
        count += count_ones(bits)
    return count


@compile_loop
def write_positions(
    words: Any,
    size: int,
    count: int,
    item: int,
    sizes: Any,
    sized: int,
    positions: Any,
    at: int,
    places: Any,
    gaps: Any,
    lengths: Any,
) -> Any:
    """Write a block's positions in its best encoding; the kind and used lengths."""
    bitmap = (size + 7) // 8
    if size * item <= bitmap + count * item:
        return _DENSE, sized, at
    set_bits(words, (size + 63) // 64, places)
    runs = runs_of(places, count, gaps, lengths)
    if 2 * runs <= count:
        k, unary = best_k(gaps, runs)
        length_k, length_unary = best_k(lengths, runs)
        coded = bytes_of(runs, k, unary) + bytes_of(runs, length_k, length_unary) + 6
        if coded < bitmap:
            sizes[sized] = runs - 1
            sizes[sized + 1] = (unary + 7) // 8
            sizes[sized + 2] = (length_unary + 7) // 8
            at = write_low(gaps, runs, k, positions, at)
            at = write_low(lengths, runs, length_k, positions, at)
            at = write_unary(gaps, runs, k, positions, at)
            at = write_unary(lengths, runs, length_k, positions, at)
            return _RUNS | k << 3 | length_k << 8, sized + 3, at
    gaps_of(places, count, gaps)
    k, unary = best_k(gaps, count)
    if bytes_of(count, k, unary) + 4 < bitmap:
        sizes[sized] = count - 1
        sizes[sized + 1] = (unary + 7) // 8
        at = write_low(gaps, count, k, positions, at)
        at = write_unary(gaps, count, k, positions, at)
        return _GAPS | k << 3, sized + 2, at
    for byte in range(bitmap):
        word = words[byte // 8] >> np.uint64(byte % 8 * 8)
        positions[at + byte] = np.uint8(word & np.uint64(255))
    return _BITMAP, sized, at + bitmap


@compile_loop
def bytes_of(count: int, k: int, unary: int) -> Any:
    """The bytes of Rice-coded numbers."""
    return (count * k + 7) // 8 + (unary + 7) // 8


@compile_loop
def gaps_of(places: Any, count: int, gaps: Any) -> None:
    """The unchanged elements before each changed one."""
    after = 0
    for i in range(count):
        gaps[i] = places[i] - after
        after = places[i] + 1


@compile_loop
def runs_of(places: Any, count: int, gaps: Any, lengths: Any) -> Any:
    """The gap before each run of changes and the run lengths less one; the number of runs."""
    runs, after = -1, -1
    for i in range(count):
        place = places[i]
        if place == after:
            lengths[runs] += 1
        else:
            runs += 1
            gaps[runs] = place - max(after, 0)
            lengths[runs] = 0
        after = place + 1
    return runs + 1


@compile_loop
def _collect_changes(
    old: Any,
    new: Any,
    old_bytes: Any,
    new_bytes: Any,
    start: int,
    places: Any,
    count: int,
    new_values: Any,
    old_values: Any,
    at: int,
    keys: Any,
) -> Any:
    """Collect a block's new and old values; the checksum's change, word by word."""
    per_word = 8 // new.itemsize
    moved, chunk, in_chunk, seen = np.uint64(0), -1, np.uint64(0), -1
    for i in range(count):
        place = start + places[i]
        new_values[at + i] = new[place]
        old_values[at + i] = old[place]
        word = place // per_word
        if word == seen:
            continue
        seen = word
        if word // CHUNK_WORDS != chunk:
            moved += in_chunk * factor_of(chunk)
            chunk, in_chunk = word // CHUNK_WORDS, np.uint64(0)
        key = keys[word % CHUNK_WORDS]
        in_chunk += term_of(word_of(new_bytes, word), key) - term_of(word_of(old_bytes, word), key)
    return moved + in_chunk * factor_of(chunk)
