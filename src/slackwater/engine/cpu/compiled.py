"""How this package compiles its loops: fused multiply-add, no other freedom with the arithmetic.

Without reassociation the order of every sum is the one written, whatever the batch.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

LANES = 16
_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number
_LOWEST = np.float32(-87.0)
_C0 = np.float32(1.9875691500e-4)
_C1 = np.float32(1.3981999507e-3)
_C2 = np.float32(8.3334519073e-3)
_C3 = np.float32(4.1665795894e-2)
_C4 = np.float32(1.6666665459e-1)
_C5 = np.float32(5.0000001201e-1)
_ONE = np.float32(1.0)


def compiled(function: Function) -> Function:
    """Compile once per machine (cached on disk), keeping the written order of sums."""
    decorate: Any = numba.njit(fastmath={"contract"}, cache=True, error_model="numpy")
    result: Function = decorate(function)
    return result


@compiled
def exp_into(values: Any, count: int, powers: Any) -> None:
    """`values[:count] = exp(values[:count])` for values at most 0, about one unit in the last place.

    Polynomial and power of two apart, so that the loops vectorise; `powers` is int32 scratch.
    """
    as_float = powers.view(np.float32)
    for j in range(count):
        x = max(values[j], _LOWEST)
        whole = (x * _LOG2E + _ROUND) - _ROUND
        r = x - whole * _LN2_HIGH - whole * _LN2_LOW
        p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
        values[j] = p * (r * r) + r + _ONE
        powers[j] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    for j in range(count):
        values[j] *= as_float[j]


@compiled
def lane_sum(values: Any, count: int, lanes: Any) -> Any:
    """The sum of `values[:count]` over 16 interleaved partial sums, then those in order."""
    for lane in range(LANES):
        lanes[lane] = np.float32(0)
    whole = count - count % LANES
    for j in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] += values[j + lane]
    for lane in range(count - whole):
        lanes[lane] += values[whole + lane]
    total = np.float32(0)
    for lane in range(LANES):
        total += lanes[lane]
    return total
