"""How many units each of several actions gets, so that together they take the least time
(ARL-Tangram, Appendix B: DPArrange).

`seconds[i, m]` is how long action i takes on m units, infinite where it cannot run on m. The
dynamic program is exact for any topology and any curve. Where every unit helps no more than the one
before it and units are plain, handing out unit by unit to whoever gains most is exact as well and
much faster; `eviction.py` uses that.
"""

import numpy as np
from numpy.typing import NDArray

from slackwater.policy.actions.topology import Topology
from slackwater.policy.compiled import jit_compile


@jit_compile
def least_seconds(
    after: NDArray[np.int64], start: int, seconds: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """`best[i, s]`: the least total of the first i actions that ends in state s; `taken[i, s]`:
    what action i - 1 took there.
    """
    count, width = seconds.shape
    states = after.shape[0]
    width = min(width, after.shape[1])
    best = np.full((count + 1, states), np.inf)
    taken = np.zeros((count + 1, states), dtype=np.int64)
    best[0, start] = 0.0
    for i in range(count):
        for state in range(states):
            here = best[i, state]
            if here == np.inf:
                continue
            for units in range(width):
                then = after[state, units]
                if then < 0:
                    continue
                total = here + seconds[i, units]
                if total < best[i + 1, then]:
                    best[i + 1, then] = total
                    # The state before cannot be had from the state after where chunks were split:
                    # keep it.
                    taken[i + 1, then] = state * (width + 1) + units
    return best, taken


@jit_compile
def trace_back(
    best: NDArray[np.float64], taken: NDArray[np.int64], count: int, width: int
) -> NDArray[np.int64]:
    """The units of the first `count` actions in their best arrangement."""
    amounts = np.zeros(count, dtype=np.int64)
    state = np.argmin(best[count])
    for i in range(count, 0, -1):
        amounts[i - 1] = taken[i, state] % (width + 1)
        state = taken[i, state] // (width + 1)
    return amounts


def arrange(topology: Topology, seconds: NDArray[np.float64]) -> tuple[float, list[int]] | None:
    """The least total and each action's units; None if not all of them fit."""
    best, taken = least_seconds(topology.after, topology.start, seconds)
    total = float(best[-1].min())
    if total == np.inf:
        return None
    width = min(seconds.shape[1], topology.after.shape[1])
    return total, trace_back(best, taken, len(seconds), width).tolist()
