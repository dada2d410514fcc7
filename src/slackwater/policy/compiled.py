"""Compiling the hot loops of policies, with their types kept."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., object])
_RUN = 16

_functions: dict[Callable[..., Any], Callable[..., Any]] = {}  # by what stands in for them
_loaded: dict[Callable[..., Any], Callable[..., Any]] = {}


def jit_compile(function: F) -> F:
    """Machine code for a function over numbers and NumPy arrays, compiled once and kept on disk.
    numba is imported at the first call: that takes a quarter of a service's start.

    Hazard: the kept code is checked against the function's own file only. After a change to a
    compiled function with callers in other files, remove it (`make fresh-kernels`).
    """

    @functools.wraps(function)
    def stand_in(*arguments: Any, **named: Any) -> object:
        if stand_in not in _loaded:
            _load()
        return _loaded[stand_in](*arguments, **named)

    _functions[stand_in] = function
    return cast(F, stand_in)


def _load() -> None:
    """Put every compiled function in the place of its stand-in, where it is defined and in the
    files of those that call it. Two threads may do so at once: either's function does.
    """
    import numba

    new = [(late, one) for late, one in list(_functions.items()) if late not in _loaded]
    # No C calls these, so numba need not compile an entry for it.
    compile_late: Any = numba.njit(cache=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]  # numba's types lack it
    made = {late: compile_late(one) for late, one in new}
    for _, function in new:
        names = function.__globals__
        for name, value in list(names.items()):
            if isinstance(value, FunctionType) and (value in made or value in _loaded):
                names[name] = made.get(value) or _loaded[value]
    _loaded.update(made)  # last: whoever finds its function here calls it at once


@jit_compile
def copy_row(into: NDArray[Any], values: NDArray[Any], count: int) -> None:
    """Copy the first `count` numbers. Hazard: a slice assignment takes numba seconds more to
    compile, in every caller, because of its message about shapes that differ.
    """
    for i in range(count):
        into[i] = values[i]


@jit_compile
def stable_order(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Like `np.argsort(values, kind="stable")`, which takes numba seconds to compile, and each of
    its callers longer.
    """
    count = len(values)
    order, merged = np.empty(count, np.int64), np.empty(count, np.int64)
    for i in range(count):  # runs in which each is moved to its place
        at = i
        while at % _RUN and values[order[at - 1]] > values[i]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i
    width = _RUN
    while width < count:
        for begin in range(0, count, 2 * width):
            left, middle = begin, min(begin + width, count)
            right, end = middle, min(begin + 2 * width, count)
            for at in range(begin, end):
                if left < middle and (right >= end or values[order[left]] <= values[order[right]]):
                    merged[at] = order[left]
                    left += 1
                else:
                    merged[at] = order[right]
                    right += 1
        order, merged = merged, order
        width *= 2
    return order
