"""Arranging is exact: whatever the curves, it finds what trying everything finds."""

from collections.abc import Callable
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.actions.simulated.arrange import arrange
from slackwater.policy.actions.topology import make_chunk_topology, make_unit_topology

WIDTH = 9


@st.composite
def curves(draw: st.DrawFn, sizes: tuple[int, ...], most: int) -> NDArray[np.float64]:
    """Up to `most` actions, each with some feasible sizes and any seconds at them."""
    count = draw(st.integers(1, most))
    seconds = np.full((count, WIDTH), np.inf)
    for row in seconds:
        feasible = draw(st.sets(st.sampled_from(sizes), min_size=1))
        for size in feasible:
            row[size] = draw(st.floats(0.01, 100))
    return seconds


def by_trying(seconds: NDArray[np.float64], possible: Callable[[list[int]], bool]) -> float:
    """The least total over all ways that `possible` admits."""
    best = np.inf
    for amounts in product(*[np.flatnonzero(np.isfinite(row)) for row in seconds]):
        if possible([int(amount) for amount in amounts]):
            best = min(best, sum(seconds[i, a] for i, a in enumerate(amounts)))
    return float(best)


@settings(max_examples=150, deadline=None)
@given(curves(tuple(range(1, WIDTH)), 4), st.integers(0, 16))
def test_plain_units_are_arranged_as_trying_everything_would(
    seconds: NDArray[np.float64], free: int
) -> None:
    expected = by_trying(seconds, lambda amounts: sum(amounts) <= free)
    found = arrange(make_unit_topology(free, WIDTH - 1), seconds)
    if found is None:
        assert expected == np.inf
        return
    total, amounts = found
    assert np.isclose(total, expected)
    assert sum(amounts) <= free
    assert np.isclose(sum(seconds[i, a] for i, a in enumerate(amounts)), total)


def places(free: frozenset[int], size: int) -> list[frozenset[int]]:
    """Every aligned chunk of this size among the free GPUs, numbered over nodes of eight."""
    starts = range(0, 16, size)
    return [chunk for s in starts if (chunk := frozenset(range(s, s + size))) <= free]


def can_be_placed(free: frozenset[int], amounts: list[int]) -> bool:
    """Whether chunks of these sizes can lie beside each other, by trying every place."""
    if not amounts:
        return True
    return any(can_be_placed(free - chunk, amounts[1:]) for chunk in places(free, amounts[0]))


def free_chunks(free: frozenset[int]) -> tuple[int, ...]:
    """How many whole aligned chunks of each level the free GPUs make."""
    counts = [0, 0, 0, 0]
    for level in (3, 2, 1, 0):
        for chunk in places(free, 1 << level):
            counts[level] += 1
            free -= chunk
    return tuple(counts)


@settings(max_examples=150, deadline=None)
@given(curves((1, 2, 4, 8), 4), st.frozensets(st.integers(0, 15)))
def test_gpu_chunks_are_arranged_as_trying_every_place_would(
    seconds: NDArray[np.float64], free: frozenset[int]
) -> None:
    expected = by_trying(seconds, lambda amounts: can_be_placed(free, amounts))
    found = arrange(make_chunk_topology(free_chunks(free)), seconds)
    if found is None:
        assert expected == np.inf
        return
    total, amounts = found
    assert np.isclose(total, expected)
    assert can_be_placed(free, amounts)
    assert np.isclose(sum(seconds[i, a] for i, a in enumerate(amounts)), total)
