"""Just-in-time compilation of the hot loops of policies with numba, without losing their types."""

import functools
import hashlib
import importlib.resources
from collections.abc import Callable, Iterator
from importlib.resources.abc import Traversable
from types import FunctionType
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., object])
_RUN = 16

# By stub: the Python function, and its compiled form once numba is loaded.
_functions: dict[Callable[..., Any], Callable[..., Any]] = {}
_loaded: dict[Callable[..., Any], Callable[..., Any]] = {}


def jit_compile(function: F) -> F:
    """Compile a function over numbers and NumPy arrays at its first call, and cache the machine
    code on disk. The decorated name is a stub until then, so that numba is not imported before it
    is needed: its import takes a quarter of a service's start.
    """

    @functools.wraps(function)
    def stub(*arguments: Any, **named: Any) -> object:
        if stub not in _loaded:
            _load()
        return _loaded[stub](*arguments, **named)

    _functions[stub] = function
    return cast(F, stub)


def _load() -> None:
    """Replace every stub by its compiled function, in the module that defines it and in all modules
    that import it. Two threads may do this at once; then the functions of either one serve.
    """
    import numba

    new = [(stub, one) for stub, one in list(_functions.items()) if stub not in _loaded]
    # No C code calls these functions, so numba need not compile an entry point for C.
    compile_lazily: Any = numba.njit(cache=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]  # numba's types lack it
    made = {stub: compile_lazily(one) for stub, one in new}
    # Numba compares a function's cache with its own file, not with those of the functions and types
    # that it uses, and cannot even read a cache that names a type which is gone.
    version = f"{numba.__version__} {_hash_sources()}"
    for function in made.values():
        if hasattr(function, "_cache"):  # it is compiled: NUMBA_DISABLE_JIT is not set
            function._cache._cache_file._version = version
    for _, function in new:
        names = function.__globals__
        for name, value in list(names.items()):
            if isinstance(value, FunctionType) and (value in made or value in _loaded):
                names[name] = made.get(value) or _loaded[value]
    _loaded.update(made)  # last: a stub calls its function as soon as it is found here


def _hash_sources() -> str:
    """A hash of all files with compiled functions."""
    digest = hashlib.sha256()
    for source in _read_sources(importlib.resources.files("slackwater.policy")):
        if jit_compile.__name__.encode() in source:
            digest.update(source)
    return digest.hexdigest()


def _read_sources(folder: Traversable) -> Iterator[bytes]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _read_sources(entry)
        elif entry.name.endswith(".py"):
            yield entry.read_bytes()


@jit_compile
def copy_row(into: NDArray[Any], values: NDArray[Any], count: int) -> None:
    """Copy the first `count` numbers. Hazard: a slice assignment takes numba seconds more to
    compile, in every caller, because of its message about shapes that differ.
    """
    for i in range(count):
        into[i] = values[i]


@jit_compile
def stable_order(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Sort like `np.argsort(values, kind="stable")`. Hazard: numba takes seconds to compile that
    one, and again in each of its callers.
    """
    count = len(values)
    order, merged = np.empty(count, np.int64), np.empty(count, np.int64)
    for i in range(count):  # insertion sort within runs, which the loop below merges
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
