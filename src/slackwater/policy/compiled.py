"""Compiling the hot loops of policies, with their types kept."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Machine code for a function over numbers and NumPy arrays; compiled once and kept on disk.

    Hazard: the kept code is checked against the function's own file only. After a change to a
    compiled function that others in other files call, remove the kept code (`make fresh-kernels`),
    or they go on with the old one.
    """
    return cast(F, numba.njit(cache=True)(function))


@compiled
def copy_row(into: NDArray[Any], values: NDArray[Any], count: int) -> None:
    """Copy the first `count` numbers.

    Hazard: to assign one slice to another takes numba seconds more to compile, in every function
    that calls the one that does so: the message about shapes that differ is compiled with it.
    """
    for i in range(count):
        into[i] = values[i]
