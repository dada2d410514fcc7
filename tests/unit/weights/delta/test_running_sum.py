"""A checksum made up of what arrives."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.weights.delta.checksum import RunningSum, checksum


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 60_000),
    st.lists(st.integers(0, 60_000), max_size=6),
    st.booleans(),
    st.randoms(),
)
def test_ranges_in_any_order_make_up_the_checksum(
    size: int, cuts: list[int], whole_chunks: bool, chance: random.Random
) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    edges = {min(cut // 4096 * 4096 if whole_chunks else cut, size) for cut in cuts}
    edges |= {0, size}
    ranges = list(zip(sorted(edges), sorted(edges)[1:], strict=False))
    chance.shuffle(ranges)
    running = RunningSum(data)
    for start, stop in ranges:
        running.add(start, stop)
    assert running.value() == checksum(data)


def test_what_has_not_come_is_read() -> None:
    data = np.arange(10_000, dtype=np.uint8)
    running = RunningSum(data)
    running.add(0, 4096)
    assert running.value() == checksum(data)
