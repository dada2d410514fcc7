"""Compiling the hot loops of policies, with their types kept."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Machine code for a function over numbers and NumPy arrays; compiled once and kept on disk.

    Hazard: the kept code is checked against the function's own file only. After a change to a
    compiled function that others in other files call, remove the kept code (`make fresh-kernels`),
    or they go on with the old one.
    """
    return cast(F, numba.njit(cache=True)(function))
