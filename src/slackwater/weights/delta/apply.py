"""Applies a frame to an old part in place; errors leave the part unchanged."""

from typing import Any

import numpy as np

from slackwater.weights.delta.checksum import (
    CHUNK_WORDS,
    KEYS,
    checksum,
    factor_of,
    range_sum,
    term_of,
    word_of,
)
from slackwater.weights.delta.compiled import compile_loop, prefetch_for_write
from slackwater.weights.delta.encode import Elements
from slackwater.weights.delta.frame import BLOCK, DeltaFrame, ValueEncoding, delta_error, unpack
from slackwater.weights.delta.places import block_places

_ZERO, _ONE = np.uint64(0), np.uint64(1)
_AHEAD = 32  # prefetch distance in changes


def apply(part: Elements, data: bytes | memoryview, known_checksum: int | None = None) -> int:
    """Apply the frame in `data` to `part` in place; returns its new checksum.

    With the part's `known_checksum` only changed elements are read, otherwise the whole part once.
    """
    return apply_frame(part, unpack(data, part.size, part.dtype.itemsize), known_checksum)


def apply_frame(part: Elements, frame: DeltaFrame, known_checksum: int | None = None) -> int:
    """`apply` for an unpacked frame."""
    before = checksum(part.view(np.uint8)) if known_checksum is None else known_checksum
    if before != frame.base_checksum:
        raise delta_error("it starts from another version than the one held here")
    places, starts = block_places(frame)
    values = frame_values(frame)
    part_bytes = part.view(np.uint8)
    change = _write(
        part, part_bytes, places, starts, values, frame.form == ValueEncoding.STEP, KEYS
    )
    after = (before + int(change)) & ((1 << 64) - 1)
    if after != frame.checksum:
        _restore(part, places, starts, values)
        raise delta_error("its values do not produce the version that it names")
    return after


def frame_values(frame: DeltaFrame) -> Elements:
    """The frame's values, assembled from their byte planes."""
    planes = [np.frombuffer(plane, np.uint8) for plane in frame.planes]
    if len(planes) == 1:
        return planes[0].copy()
    values = np.empty((len(planes[0]), len(planes)), np.uint8)
    for byte, plane in enumerate(planes):
        values[:, byte] = plane
    return values.reshape(-1).view(f"u{frame.item_bytes}")


@compile_loop
def _write(
    part: Any, part_bytes: Any, places: Any, starts: Any, values: Any, as_steps: Any, keys: Any
) -> Any:
    """Write the new elements and store the old ones in `values`; returns the checksum's change."""
    item, moved = part.itemsize, np.uint64(0)
    for block in range(starts.size - 1):
        first, stop, start = starts[block], starts[block + 1], block * BLOCK
        size = min(part.size - start, BLOCK)
        if first == stop:
            continue
        if stop - first == size:
            moved -= range_sum(part_bytes, start * item, (start + size) * item, keys)
            for i in range(size):
                was = part[start + i]
                part[start + i] = _decode_value(was, values[first + i], as_steps)
                values[first + i] = was
            moved += range_sum(part_bytes, start * item, (start + size) * item, keys)
        else:
            moved += _write_block(
                part, part_bytes, start, places, values, first, stop, as_steps, keys
            )
    return moved


@compile_loop
def _decode_value(was: Any, value: Any, as_steps: Any) -> Any:
    """The new element from the old one and the sent value; the caller masks the upper bits."""
    if as_steps:
        sent = np.uint64(value)
        return np.uint64(was) + ((sent >> _ONE) ^ (_ZERO - (sent & _ONE)))
    return np.uint64(value)


@compile_loop
def _write_block(
    part: Any,
    part_bytes: Any,
    start: int,
    places: Any,
    values: Any,
    first: int,
    stop: int,
    as_steps: Any,
    keys: Any,
) -> Any:
    """Write a block that is not dense; updates the checksum word by word, chunk by chunk."""
    item = part.itemsize
    per_word, full = 8 // item, (_ONE << np.uint64(8 * item)) - _ONE
    base = np.uintp(part.ctypes.data) + np.uintp(start * item)
    moved, chunk, in_chunk = np.uint64(0), -1, np.uint64(0)
    for i in range(first, stop):
        ahead = min(i + _AHEAD, stop - 1)
        prefetch_for_write(base + np.uintp(np.int64(places[ahead]) * item))
        place = start + np.int64(places[i])
        word = place // per_word
        before, shift = word_of(part_bytes, word), np.uint64(place % per_word * item * 8)
        was = (before >> shift) & full
        value = _decode_value(was, values[i], as_steps) & full
        after = before ^ ((was ^ value) << shift)
        part[place] = value
        values[i] = was
        if word // CHUNK_WORDS != chunk:
            moved += in_chunk * factor_of(chunk)
            chunk, in_chunk = word // CHUNK_WORDS, np.uint64(0)
        key = keys[word % CHUNK_WORDS]
        in_chunk += term_of(after, key) - term_of(before, key)
    return moved + in_chunk * factor_of(chunk)


@compile_loop
def _restore(part: Any, places: Any, starts: Any, values: Any) -> None:
    """Restore the old elements, which `_write` stored in `values`."""
    for block in range(starts.size - 1):
        first, stop, start = starts[block], starts[block + 1], block * BLOCK
        dense = stop - first == min(part.size - start, BLOCK)
        for i in range(first, stop):
            part[start + (i - first if dense else np.int64(places[i]))] = values[i]
