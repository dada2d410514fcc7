"""The delta codec: exact to the bit, small, and safe against any bytes."""

import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slackwater.weights.delta.apply import apply
from slackwater.weights.delta.checksum import checksum
from slackwater.weights.delta.encode import difference, encode
from slackwater.weights.delta.frame import (
    BLOCK,
    HEAD_BYTES,
    DeltaError,
    DeltaFrame,
    IndexEncoding,
    ValueEncoding,
    pack,
)

Elements = NDArray[Any]
TYPES = [np.uint8, np.uint16, np.uint32]


def part(elements: int, dtype: Any = np.uint16, seed: int = 0) -> Elements:
    values = np.random.default_rng(seed).integers(0, 1 << (8 * np.dtype(dtype).itemsize), elements)
    return values.astype(dtype)


def changed(old: Elements, places: Any, seed: int = 1) -> Elements:
    """A copy with other values at `places`."""
    new = old.copy()
    new[places] ^= part(len(new), old.dtype, seed)[places] | 1
    return new


def kinds(old: Elements, new: Elements) -> list[IndexEncoding]:
    found = np.frombuffer(difference(old, new).kinds, np.uint16) & 7
    return [IndexEncoding(kind) for kind in found.tolist()]


def check_exact(old: Elements, new: Elements) -> bytes:
    data = encode(old, new)
    for known in (None, checksum(old.view(np.uint8))):
        there = old.copy()
        assert apply(there, data, known) == checksum(new.view(np.uint8))
        assert np.array_equal(there, new)
    return data


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("share", [0.0, 0.0003, 0.01, 0.05, 0.2, 0.6, 1.0])
def test_scattered_changes_come_back_to_the_bit(dtype: Any, share: float) -> None:
    old = part(2 * BLOCK + 777, dtype)
    new = changed(old, np.random.default_rng(2).random(len(old)) < share)
    check_exact(old, new)


@given(
    st.sampled_from(TYPES),
    st.integers(0, 3 * BLOCK),
    st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.integers(1, 3000)), max_size=8),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_any_mixture_of_runs_comes_back_to_the_bit(
    dtype: Any, elements: int, spans: list[tuple[int, int]], every: int
) -> None:
    old = part(elements, dtype)
    mask = np.zeros(elements, bool)
    for start, length in spans:
        mask[start : start + length] = True
    if every:
        mask[::every] = True
    new = changed(old, mask)
    data = check_exact(old, new)
    assert len(data) <= new.nbytes + HEAD_BYTES + 9 * 7 + 2 * (elements // BLOCK + 1)


def test_each_block_takes_the_smallest_kind() -> None:
    old = part(6 * BLOCK)
    new = old.copy()
    everywhere, at_random = np.arange(BLOCK), np.random.default_rng(0).random(BLOCK)
    for block, places in enumerate(
        [
            everywhere[:0],
            everywhere,
            everywhere[at_random < 0.5],
            everywhere[at_random < 0.01],
            everywhere[1000:9000],
            everywhere[[7]],
        ]
    ):
        new[block * BLOCK + places] ^= 3
    assert kinds(old, new) == [
        IndexEncoding.NONE,
        IndexEncoding.DENSE,
        IndexEncoding.BITMAP,
        IndexEncoding.GAPS,
        IndexEncoding.RUNS,
        IndexEncoding.GAPS,
    ]
    check_exact(old, new)


def test_one_percent_of_scattered_bf16_is_about_half_of_a_coordinate_list() -> None:
    old = part(1 << 20)
    new = changed(old, np.random.default_rng(3).random(len(old)) < 0.01)
    coordinates = 6 * int((old != new).sum())
    assert len(encode(old, new)) <= 0.55 * coordinates


def test_small_steps_are_sent_as_steps() -> None:
    old = part(1 << 18)
    new = old.copy()
    new[np.random.default_rng(3).random(len(old)) < 0.01] += np.uint16(1)
    frame = difference(old, new)
    assert frame.form == ValueEncoding.STEP
    assert len(check_exact(old, new)) <= 0.25 * 6 * int((old != new).sum())


def test_not_a_number_and_minus_zero_are_bits_like_any() -> None:
    old = np.array([0.0, -0.0, np.nan, np.inf, 1e-45, 1.0] * 20, np.float32).view(np.uint32)
    new = old.copy()
    new[0], new[2] = 0x80000000, 0x7FC00001
    check_exact(old, new)


def test_unaligned_parts_are_parts() -> None:
    memory = np.frombuffer(bytearray(part(2 * BLOCK, np.uint8).tobytes() + b"x"), np.uint8)
    old, new = memory[1:].view(np.uint16), memory[:-1].view(np.uint16).copy()
    new[:50] = old[:50]
    check_exact(old, new)


def test_a_delta_is_refused_on_another_base_and_the_base_stays() -> None:
    old = part(BLOCK)
    data = encode(old, changed(old, slice(5, 900, 7)))
    other = changed(old, [BLOCK - 1])
    before = other.copy()
    with pytest.raises(DeltaError, match="another version"):
        apply(other, data)
    with pytest.raises(DeltaError, match="another version"):
        apply(other, data, checksum(other.view(np.uint8)))
    assert np.array_equal(other, before)


def test_a_part_of_another_size_is_refused() -> None:
    old = part(BLOCK)
    data = encode(old, changed(old, [1]))
    with pytest.raises(DeltaError, match="elements"):
        apply(part(BLOCK - 1), data)
    with pytest.raises(DeltaError, match="elements"):
        apply(part(BLOCK, np.uint32), data)


def resealed(data: bytearray) -> bytes:
    """The same bytes with the frame's own checksum made right, as a liar would."""
    data[HEAD_BYTES - 4 : HEAD_BYTES] = zlib.crc32(bytes(data[HEAD_BYTES:])).to_bytes(4, "little")
    return bytes(data)


MUTATION_BASE = part(BLOCK + 300)
MUTATION_FRAMES = [
    encode(MUTATION_BASE, changed(MUTATION_BASE, np.random.default_rng(4).random(BLOCK + 300) < p))
    for p in (0.001, 0.02, 0.5, 1.0)
] + [encode(MUTATION_BASE, changed(MUTATION_BASE, slice(900, 5000)))]


@given(
    st.sampled_from(MUTATION_FRAMES),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=6),
    st.integers(0, 1 << 20),
    st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_whatever_the_bytes_the_part_is_new_or_as_it_was(
    frame: bytes, edits: list[tuple[int, int]], cut: int, honest_end: bool
) -> None:
    data = bytearray(frame)
    for place, byte in edits:
        data[place % len(data)] = byte
    if not honest_end:
        data = data[: cut % (len(data) + 1)]
    there = MUTATION_BASE.copy()
    try:
        apply(there, resealed(data) if len(data) >= HEAD_BYTES else bytes(data))
    except DeltaError:
        assert np.array_equal(there, MUTATION_BASE)
    else:  # the edits changed nothing that matters
        whole = MUTATION_BASE.copy()
        apply(whole, frame)
        assert np.array_equal(there, whole)


@given(st.binary(max_size=400))
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    with pytest.raises(DeltaError):
        apply(MUTATION_BASE.copy(), data)


def flipped(stream: bytes, bit: int) -> bytes:
    data = bytearray(stream)
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def bitmap_frame(old: Elements, new: Elements) -> DeltaFrame:
    """The difference with every block as a bitmap, which a writer may choose."""
    mask = old != new
    blocks = [mask[start : start + BLOCK] for start in range(0, len(mask), BLOCK)]
    values = new[mask].view(np.uint8).reshape(-1, old.itemsize)
    return replace(
        difference(old, new),
        form=ValueEncoding.ELEMENT,
        kinds=int(IndexEncoding.BITMAP).to_bytes(2, "little") * len(blocks),
        sizes=b"",
        positions=b"".join(np.packbits(b, bitorder="little").tobytes() for b in blocks),
        planes=tuple(plane.tobytes() for plane in values.T),
    )


def unused_kind_bits(kinds: bytes) -> list[int]:
    """The bits of the kinds that their kind gives no meaning."""
    first = {IndexEncoding.GAPS: 8, IndexEncoding.RUNS: 16}
    entries = np.frombuffer(kinds, "<u2").tolist()
    return [
        16 * block + bit
        for block, entry in enumerate(entries)
        for bit in range(first.get(IndexEncoding(entry & 7), 3), 16)
    ]


@given(
    st.sampled_from(TYPES),
    st.sampled_from([7, 60, 300, 1001, BLOCK + 5]),
    st.sampled_from([0.004, 0.03, 0.5, "run"]),
    st.booleans(),
    st.data(),
)
@settings(deadline=None, max_examples=200)
def test_no_bit_of_the_positions_is_without_meaning(
    dtype: Any, elements: int, share: Any, as_bitmap: bool, data: st.DataObject
) -> None:
    """Filled-up bits included: a bit that nobody reads could carry what nobody checks."""
    old = part(elements, dtype)
    mask = np.random.default_rng(5).random(elements) < (0.9 if share == "run" else share)
    mask[[3, elements - 1]] = True
    if share == "run":
        mask[:] = False
        mask[elements // 3 : elements // 2 + 1] = True
    new = changed(old, mask)
    frame = bitmap_frame(old, new) if as_bitmap else difference(old, new)
    there = old.copy()
    apply(there, pack(frame))
    assert np.array_equal(there, new)
    places = [("positions", bit) for bit in range(8 * len(frame.positions))]
    places += [("kinds", bit) for bit in unused_kind_bits(frame.kinds)]
    tail = places[-32:] if len(places) > 32 else places
    name, bit = data.draw(st.sampled_from(tail) | st.sampled_from(places))
    if name == "kinds":
        damaged = replace(frame, kinds=flipped(frame.kinds, bit))
    else:
        damaged = replace(frame, positions=flipped(frame.positions, bit))
    there = old.copy()
    with pytest.raises(DeltaError):
        apply(there, pack(damaged))
    assert np.array_equal(there, old)


STREAM = struct.Struct("<BII")  # as the page says: coding, bytes before compression, as stored


def with_last_stream(frame: bytes, streams: int, stored: bytes, raw: int) -> bytes:
    """The frame with other bytes for its last stream, compressed."""
    data = bytearray(frame)
    entry = HEAD_BYTES + (streams - 1) * STREAM.size
    _, _, old_size = STREAM.unpack_from(data, entry)
    del data[len(data) - old_size :]
    STREAM.pack_into(data, entry, 1, raw, len(stored))
    return resealed(data + stored)


FOLLOWING = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.binary(max_size=40).map(zstandard.ZstdCompressor().compress),
    st.binary(max_size=9).map(
        lambda held: b"\x50\x2a\x4d\x18" + len(held).to_bytes(4, "little") + held
    ),
)


@given(FOLLOWING, st.integers(0, 3000))
@settings(deadline=None, max_examples=100)
def test_nothing_may_follow_a_compressed_stream(after: bytes, values: int) -> None:
    old = part(BLOCK)
    new = old.copy()
    new[:values] += np.uint16(1)
    frame = difference(old, new)
    plane = zstandard.ZstdCompressor().compress(frame.planes[-1])
    honest = with_last_stream(pack(frame), 5, plane, len(frame.planes[-1]))
    there = old.copy()
    if values:
        apply(there, honest)
        assert np.array_equal(there, new)
    there = old.copy()
    with pytest.raises(DeltaError):
        apply(there, with_last_stream(pack(frame), 5, plane + after, len(frame.planes[-1])))
    assert np.array_equal(there, old)
