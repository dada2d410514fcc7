"""Capacity over a cyclic horizon: the free nodes of a pool in each second, and the free windows of
a node (PlexRL 4.3.1, 5.2.1).
"""

import numpy as np

from slackwater.policy.columns import Floats, Ints
from slackwater.policy.compiled import jit_compile

HORIZON_S = 28_800


@jit_compile
def _range_add(
    low: Ints, pending: Ints, node: int, left: int, right: int, a: int, b: int, by: int
) -> None:
    """Add `by` to the seconds [a, b) in the subtree of `node`, which covers [left, right)."""
    if a <= left and right <= b:
        low[node] += by
        pending[node] += by
        return
    middle = (left + right) // 2
    if a < middle:
        _range_add(low, pending, 2 * node, left, middle, a, b, by)
    if b > middle:
        _range_add(low, pending, 2 * node + 1, middle, right, a, b, by)
    low[node] = min(low[2 * node], low[2 * node + 1]) + pending[node]


@jit_compile
def _range_min(low: Ints, pending: Ints, node: int, left: int, right: int, a: int, b: int) -> int:
    if a <= left and right <= b:
        return int(low[node])
    middle = (left + right) // 2
    least = 1 << 40
    if a < middle:
        least = min(least, _range_min(low, pending, 2 * node, left, middle, a, b))
    if b > middle:
        least = min(least, _range_min(low, pending, 2 * node + 1, middle, right, a, b))
    return int(least + pending[node])


class FreeNodes:
    """The number of free nodes of a pool in each second of the horizon, as a segment tree."""

    def __init__(self, nodes: int, seconds: int = HORIZON_S) -> None:
        self.seconds = seconds
        size = 1
        while size < seconds:
            size *= 2
        self._size = size
        self._low: Ints = np.full(2 * size, nodes, np.int64)
        self._pending: Ints = np.zeros(2 * size, np.int64)

    def add(self, start: int, length: int, nodes: int) -> None:
        """Change the number of free nodes in a window of the ring."""
        for a, b in self._windows(start, length):
            _range_add(self._low, self._pending, 1, 0, self._size, a, b, nodes)

    def min_free(self, start: int, length: int) -> int:
        """The fewest free nodes at any time in a window of the ring."""
        return min(
            _range_min(self._low, self._pending, 1, 0, self._size, a, b)
            for a, b in self._windows(start, length)
        )

    def _windows(self, start: int, length: int) -> list[tuple[int, int]]:
        start %= self.seconds
        end = start + length
        if end <= self.seconds:
            return [(start, end)]
        return [(start, self.seconds), (0, end - self.seconds)]


@jit_compile
def _is_window_free(busy: Floats, start: float, end: float) -> bool:
    after = np.searchsorted(busy[:, 0], end - 1e-6)
    return bool(after == 0 or busy[after - 1, 1] <= start + 1e-6)


@jit_compile
def is_free(busy: Floats, start: float, length: float, seconds: float) -> bool:
    """Whether a window of the ring overlaps no busy one. `busy` holds (start, end), sorted; they do
    not overlap each other or wrap.
    """
    if len(busy) == 0:
        return True
    start %= seconds
    end = start + length
    if end <= seconds:
        return _is_window_free(busy, start, end)
    return _is_window_free(busy, start, seconds) and _is_window_free(busy, 0.0, end - seconds)


@jit_compile
def smallest_shift(
    roll_busy: Floats, train_busy: Floats, roll_s: float, train_s: float, times: int, seconds: float
) -> float:
    """The smallest shift at which all segments of a job that recurs `times` times fall into free
    windows; -1 if there is none.

    At the smallest shift some segment begins where a busy window ends, so only those are tried.
    """
    period = seconds / times
    ends = np.empty(1 + len(roll_busy) + len(train_busy))
    ends[0] = 0.0
    for i in range(len(roll_busy)):
        ends[1 + i] = roll_busy[i, 1] % period
    for i in range(len(train_busy)):
        ends[1 + len(roll_busy) + i] = (train_busy[i, 1] - roll_s) % period
    ends.sort()
    before = -1.0
    for shift in ends:
        if shift - before < 1e-6:
            continue
        before = shift
        fits = True
        for turn in range(times):
            at = shift + turn * period
            if not is_free(roll_busy, at, roll_s, seconds) or not is_free(
                train_busy, at + roll_s, train_s, seconds
            ):
                fits = False
                break
        if fits:
            return float(shift)
    return -1.0


def add_busy_windows(
    busy: Floats, start: float, length: float, times: int, seconds: float
) -> Floats:
    """Add the windows of a segment that recurs `times` times to the sorted busy windows. A window
    over the end of the horizon is split.
    """
    starts = (start + np.arange(times) * (seconds / times)) % seconds
    ends = starts + length
    over = ends > seconds
    windows = [
        busy,
        np.stack([starts, np.minimum(ends, seconds)], axis=1),
        np.stack([np.zeros(int(over.sum())), ends[over] - seconds], axis=1),
    ]
    together = np.concatenate(windows)
    return np.asarray(together[np.argsort(together[:, 0], kind="stable")])
