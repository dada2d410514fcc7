"""Interval fitting agrees with trying every second."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.policy.placement.horizon_ring import (
    FreeNodes,
    add_busy_windows,
    is_free,
    smallest_shift,
)
from slackwater.policy.placement.ring import first_fit_on_node_s, occupy

PERIOD = 60


def windows(pairs: list[tuple[int, int]]) -> tuple[list[bool], np.ndarray, np.ndarray, np.ndarray]:
    """Take those windows that are free, in order: seconds taken, and the kernel's arrays."""
    taken = [False] * PERIOD
    at, length, count = np.zeros((1, 40)), np.zeros((1, 40)), np.zeros(1, np.int64)
    for start, need in pairs:
        seconds = [(start + i) % PERIOD for i in range(need)]
        if not any(taken[second] for second in seconds):
            for second in seconds:
                taken[second] = True
            occupy(0, at, length, count, float(PERIOD), float(start), float(need))
    return taken, at, length, count


pairs = st.lists(st.tuples(st.integers(0, PERIOD - 1), st.integers(1, 15)), max_size=8)


@settings(max_examples=300, deadline=None)
@given(pairs, st.integers(0, 3 * PERIOD), st.integers(1, 40))
def test_the_first_fit_is_the_first_second_that_works(
    taken_pairs: list[tuple[int, int]], start: int, need: int
) -> None:
    taken, at, length, count = windows(taken_pairs)
    expected = next(
        (
            float(begin)
            for begin in range(start, start + PERIOD + 1)
            if not any(taken[(begin + i) % PERIOD] for i in range(need))
        ),
        np.inf,
    )
    assert (
        first_fit_on_node_s(
            at[0], length[0], int(count[0]), float(PERIOD), float(start), float(need)
        )
        == expected
    )


@settings(max_examples=200, deadline=None)
@given(pairs, pairs, st.integers(1, 10), st.integers(1, 10), st.sampled_from([1, 2, 3, 4]))
def test_the_micro_shift_is_the_smallest_that_works(
    roll_pairs: list[tuple[int, int]],
    train_pairs: list[tuple[int, int]],
    roll: int,
    train: int,
    times: int,
) -> None:
    roll_taken, *_ = windows(roll_pairs)
    train_taken, *_ = windows(train_pairs)
    busy = []
    for taken in (roll_taken, train_taken):
        rows = [(float(i), float(i + 1)) for i in range(PERIOD) if taken[i]]
        busy.append(np.array(rows).reshape(-1, 2))
    period = PERIOD // times
    expected = next(
        (
            float(shift)
            for shift in range(period)
            if not any(
                roll_taken[(shift + turn * period + i) % PERIOD]
                for turn in range(times)
                for i in range(roll)
            )
            and not any(
                train_taken[(shift + turn * period + roll + i) % PERIOD]
                for turn in range(times)
                for i in range(train)
            )
        ),
        -1.0,
    )
    found = smallest_shift(busy[0], busy[1], float(roll), float(train), times, float(PERIOD))
    assert found == expected


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 100), st.integers(-3, 3)), max_size=12)
)
def test_the_tree_knows_the_fewest_free_nodes_of_any_window(
    changes: list[tuple[int, int, int]],
) -> None:
    plain = [10] * 100
    tree = FreeNodes(10, seconds=100)
    for start, length, by in changes:
        tree.add(start, length, by)
        for i in range(length):
            plain[(start + i) % 100] += by
        assert tree.min_free(start, length) == min(plain[(start + i) % 100] for i in range(length))
        assert tree.min_free(0, 100) == min(plain)


def test_a_window_over_the_end_of_the_horizon_is_split() -> None:
    busy = add_busy_windows(np.zeros((0, 2)), 95.0, 10.0, 1, 100)
    assert busy.tolist() == [[0.0, 5.0], [95.0, 100.0]]
    assert is_free(busy, 5.0, 90.0, 100.0)
    assert not is_free(busy, 90.0, 20.0, 100.0)
