"""Compilation of this package's loops: fused multiply-add, and every sum in the order written."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from slackwater.engine.cpu.vector_code import INT64, LANES, Value, VectorCode

Function = TypeVar("Function", bound=Callable[..., Any])

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


def compile_loop(function: Function) -> Function:
    """Compile once per machine (cached on disk), keeping the written order of sums."""
    decorate: Any = numba.njit(fastmath={"contract"}, cache=True, error_model="numpy")
    result: Function = decorate(function)
    return result


def llvm_intrinsic(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a compiled function of these types; `emit(builder, ...)` writes its LLVM code."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def declare(typing: Any, *given: Any) -> Any:
            def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = emit(builder, *values)
                return context.get_dummy_value() if value is None else value

            return result(*arguments), build

        declare.__name__, declare.__signature__ = emit.__name__, inspect.signature(emit)  # type: ignore[attr-defined]  # numba reads it
        return intrinsic(declare)

    return decorate


@llvm_intrinsic(types.float32, types.int32)
def _as_float(builder: Any, bits: Any) -> Any:
    """The float32 that has these bits."""
    return builder.bitcast(bits, ir.FloatType())


@compile_loop
def exp_nonpositive(value: Any) -> Any:
    """exp of a number that is at most 0, within about one unit in the last place; vectorises."""
    x = max(value, _LOWEST)
    whole = (x * _LOG2E + _ROUND) - _ROUND
    r = x - whole * _LN2_HIGH - whole * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    power = (np.int32(whole) + np.int32(127)) << np.int32(23)
    return (p * (r * r) + r + _ONE) * _as_float(np.int32(power))


@llvm_intrinsic(types.float32, types.uintp, types.uintp)
def _vector_sum(builder: Any, values: Any, vectors: Any) -> Any:
    """The sum of `vectors` times 16 floats: lane by lane in order, then the lanes in pairs."""
    code = VectorCode(builder)
    floats = code.floats(values)

    def add(index: Value, sums: Sequence[Value]) -> list[Value]:
        return [builder.fadd(sums[0], code.load(floats, builder.mul(index, INT64(LANES))))]

    (total,) = code.loop(vectors, [code.zero()], add)
    return code.reduce_lanes(total, builder.fadd)


@llvm_intrinsic(types.float32, types.uintp, types.uintp)
def _vector_max(builder: Any, values: Any, vectors: Any) -> Any:
    """The largest of `vectors` times 16 floats."""
    code = VectorCode(builder)
    floats = code.floats(values)

    def join(index: Value, tops: Sequence[Value]) -> list[Value]:
        return [code.maximum(tops[0], code.load(floats, builder.mul(index, INT64(LANES))))]

    (top,) = code.loop(vectors, [code.load(floats, INT64(0))], join)
    return code.reduce_lanes(top, code.maximum)


@compile_loop
def lane_sum(values: Any, count: int) -> Any:
    """The sum of `values[:count]`: 16 interleaved partial sums, those in pairs, then the rest."""
    vectors, total = count // LANES, np.float32(0)
    if vectors > 0:
        total = _vector_sum(values.ctypes.data, vectors)
    for j in range(vectors * LANES, count):
        total += values[j]
    return total


@compile_loop
def lane_max(values: Any, count: int) -> Any:
    """The largest of `values[:count]`; `count` is at least 1."""
    vectors, top = count // LANES, values[0]
    if vectors > 0:
        top = _vector_max(values.ctypes.data, vectors)
    for j in range(vectors * LANES, count):
        top = max(top, values[j])
    return top
