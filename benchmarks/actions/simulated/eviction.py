"""Fewer actions with more each, or more actions with less each? Evict the last while the sum of
completion times falls.

The compiled half of ARL-Tangram's Algorithms 1 and 2. Sums are exact for those that start now; for
those that wait, a heap of completions is run forward with everybody on the least that he needs.
Unlike the paper's heap, ours counts units: an action that ends on 16 cores lets 16 single-core ones
start, not one.
"""

import numpy as np
from numpy.typing import NDArray

from benchmarks.actions.simulated.arrange import least_seconds, trace_back
from slackwater.policy.compiled import jit_compile


@jit_compile
def _push(
    times: NDArray[np.float64], units: NDArray[np.int64], size: int, time: float, unit: int
) -> None:
    """Put one completion on the heap, which has room."""
    child = size
    while child > 0:
        parent = (child - 1) >> 1
        if times[parent] <= time:
            break
        times[child], units[child] = times[parent], units[parent]
        child = parent
    times[child], units[child] = time, unit


@jit_compile
def _drop_first(times: NDArray[np.float64], units: NDArray[np.int64], size: int) -> None:
    """Take the earliest of `size` completions off the heap."""
    last_time, last_unit = times[size - 1], units[size - 1]
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and times[child + 1] < times[child]:
            child += 1
        if times[child] >= last_time:
            break
        times[parent], units[parent] = times[child], units[child]
        parent = child
    times[parent], units[parent] = last_time, last_unit


@jit_compile
def waiting_sum(
    ends: NDArray[np.float64],
    end_units: NDArray[np.int64],
    size: int,
    free: int,
    rest_s: NDArray[np.float64],
    rest_units: NDArray[np.int64],
) -> float:
    """The sum of completion times of those that wait, started in order as units come free. Uses up
    the heap.
    """
    total, clock = 0.0, 0.0
    for i in range(len(rest_s)):
        while free < rest_units[i] and size > 0:
            clock = max(clock, ends[0])
            free += end_units[0]
            _drop_first(ends, end_units, size)
            size -= 1
        if free < rest_units[i]:
            break
        free -= rest_units[i]
        total += clock + rest_s[i]
        _push(ends, end_units, size, clock + rest_s[i], rest_units[i])
        size += 1
    return total


@jit_compile
def hand_out(rows: NDArray[np.float64], count: int, spare: int, amounts: NDArray[np.int64]) -> int:
    """Give spare units one by one to whichever of the first `count` gains most by one more; returns
    what nobody wants.

    Exact for convex curves: `amounts` is continued, so giving back an evicted action's units goes
    on where it stopped.
    """
    gains = np.empty(count)
    who = np.empty(count, dtype=np.int64)
    for i in range(count):
        more = amounts[i] + 1
        gain = rows[i, amounts[i]] - rows[i, more] if more < rows.shape[1] else 0.0
        _push(gains, who, i, -gain if np.isfinite(gain) else 0.0, i)
    while spare > 0 and count > 0 and gains[0] < 0.0:
        i = who[0]
        amounts[i] += 1
        spare -= 1
        more = amounts[i] + 1
        gain = rows[i, amounts[i]] - rows[i, more] if more < rows.shape[1] else 0.0
        _drop_first(gains, who, count)
        _push(gains, who, count - 1, -gain if np.isfinite(gain) else 0.0, i)
    return spare


@jit_compile
def _nth_amount(row: NDArray[np.float64], nth: int) -> int:
    """The nth smallest feasible amount, from 0 on; -1 if there are not so many."""
    for units in range(len(row)):
        if np.isfinite(row[units]):
            if nth == 0:
                return units
            nth -= 1
    return -1


@jit_compile
def _completion_sum(
    rows: NDArray[np.float64],
    least: NDArray[np.int64],
    kept: int,
    amounts: NDArray[np.int64],
    free: int,
    ends: NDArray[np.float64],
    end_units: NDArray[np.int64],
    rest_s: NDArray[np.float64],
    rest_units: NDArray[np.int64],
    first_s: NDArray[np.float64],
    first_units: NDArray[np.int64],
    depth: int,
) -> float:
    """If the first `kept` start with these amounts: their completion times, exactly, and those of
    all who wait, about.
    """
    evicted = len(rows) - kept
    started_s = 0.0
    for i in range(kept):
        started_s += rows[i, amounts[i]]
        free -= amounts[i]
    line_s = np.empty(evicted + len(rest_s))
    line_units = np.empty(len(line_s), dtype=np.int64)
    for i in range(evicted):
        line_s[i] = rows[kept + i, least[kept + i]]
        line_units[i] = least[kept + i]
    for i in range(len(rest_s)):  # element by element: slice copies take numba longer to compile
        line_s[evicted + i] = rest_s[i]
        line_units[evicted + i] = rest_units[i]
    heap_s = np.empty(len(ends) + kept + len(line_s))
    heap_units = np.empty(len(heap_s), dtype=np.int64)
    fewest_s = np.inf
    for nth in range(depth):
        if evicted > 0:
            other = _nth_amount(rows[kept], nth)
            if other < 0:
                break
            line_s[0], line_units[0] = rows[kept, other], other
        elif nth < len(first_s):
            line_s[0], line_units[0] = first_s[nth], first_units[nth]
        elif nth > 0:
            break
        size = len(ends)
        for i in range(size):
            heap_s[i] = ends[i]
            heap_units[i] = end_units[i]
        for i in range(kept):
            _push(heap_s, heap_units, size, rows[i, amounts[i]], amounts[i])
            size += 1
        fewest_s = min(fewest_s, waiting_sum(heap_s, heap_units, size, free, line_s, line_units))
    return started_s + fewest_s


@jit_compile
def evict(
    rows: NDArray[np.float64],
    least: NDArray[np.int64],
    convex: bool,
    after: NDArray[np.int64],
    start: int,
    free: int,
    ends: NDArray[np.float64],
    end_units: NDArray[np.int64],
    rest_s: NDArray[np.float64],
    rest_units: NDArray[np.int64],
    first_s: NDArray[np.float64],
    first_units: NDArray[np.int64],
    depth: int,
    patience: int,
) -> NDArray[np.int64]:
    """Units for the elastic candidates `rows`, 0 for the evicted ones; the first is never evicted.

    `free` units are theirs, in state `start` of the topology. `ends`, ascending, and `end_units`
    are the completions to come of all else. The first that waits may take one of its `depth`
    smallest amounts (`first_*` for the first of `rest_*`), the others take the least. `patience`
    evictions in a row may fail to help before we stop; the paper's is 1.
    """
    count = len(rows)
    width = min(rows.shape[1], after.shape[1])
    amounts = np.empty(count, dtype=np.int64)
    spare = free
    for i in range(count):
        amounts[i] = least[i]
        spare -= least[i]
    best, taken = np.empty((0, 0)), np.empty((0, 0), dtype=np.int64)
    if not convex:
        best, taken = least_seconds(after, start, rows)
    chosen = np.zeros(count, dtype=np.int64)
    chosen_sum = np.inf
    failures = 0
    for kept in range(count, 0, -1):
        if convex:
            if kept < count:
                spare += amounts[kept]
            spare = hand_out(rows, kept, spare, amounts)
        else:
            amounts = trace_back(best, taken, kept, width)
        total = _completion_sum(
            rows,
            least,
            kept,
            amounts,
            free,
            ends,
            end_units,
            rest_s,
            rest_units,
            first_s,
            first_units,
            depth,
        )
        if total < chosen_sum - 1e-12:
            chosen_sum = total
            for i in range(count):
                chosen[i] = amounts[i] if i < kept else 0
            failures = 0
        else:
            failures += 1
            if failures >= patience:
                break
    return chosen
