"""Compiling the hot loops of policies, with their types kept."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Machine code for a function over numbers and NumPy arrays; compiled once and kept on disk."""
    return cast(F, numba.njit(cache=True)(function))
