"""Compilation of the delta codec's loops, and CPU instructions that Python does not have."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])

_WORD, _INT = ir.IntType(64), ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()
LANES = 64  # elements that one comparison looks at: a bit each


def compile_loop(function: Function) -> Function:
    """Compile once per machine (cached on disk); other threads run meanwhile."""
    decorate: Any = numba.njit(cache=True, nogil=True, error_model="numpy")
    result: Function = decorate(function)
    return result


def llvm_intrinsic(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a compiled function of these types; `emit(builder, ...)` writes its LLVM code."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def declare(typing: Any, *given: Any) -> Any:
            del typing, given
            return result(*arguments), lambda _context, builder, _types, given: emit(
                builder, *given
            )

        declare.__name__, declare.__signature__ = emit.__name__, inspect.signature(emit)  # type: ignore[attr-defined]  # numba reads it
        return intrinsic(declare)

    return decorate


def _make_comparison(bits: int) -> Any:
    """Compare 64 elements of `bits` bits at two addresses; the differing ones, as one word."""
    vector = ir.VectorType(ir.IntType(bits), LANES)

    @llvm_intrinsic(types.uint64, types.uintp, types.uintp)
    def differing(builder: Any, one: Any, other: Any) -> Any:
        pointers = [builder.inttoptr(each, vector.as_pointer()) for each in (one, other)]
        left, right = (builder.load(pointer, align=1) for pointer in pointers)
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), _WORD)

    return differing


differing_bytes = _make_comparison(8)
differing_shorts = _make_comparison(16)
differing_words = _make_comparison(32)


@llvm_intrinsic(types.uint64, types.uintp)
def load_word(builder: Any, address: Any) -> Any:
    """The 64-bit word at any address, aligned or not."""
    return builder.load(builder.inttoptr(address, _WORD.as_pointer()), align=1)


@llvm_intrinsic(types.int64, types.uint64)
def trailing_zeros(builder: Any, word: Any) -> Any:
    """Trailing zero bits of a non-zero word."""
    return builder.cttz(word, ir.IntType(1)(1))


@llvm_intrinsic(types.int64, types.uint64)
def count_ones(builder: Any, word: Any) -> Any:
    """Set bits of a word."""
    return builder.ctpop(word)


SUM_WORDS = 8  # 64-bit words that one step of `sum_keyed_words` takes


@llvm_intrinsic(types.uint64, types.uintp, types.uintp, types.uint64)
def sum_keyed_words(builder: Any, data: Any, keys: Any, steps: Any) -> Any:
    """The sum of `w + low(w + key) * high(w, key)` over `steps` > 0 times 8 words (checksum.py).

    Written as vectors, since the compiler does not vectorize a loop over addresses.
    """
    vector = ir.VectorType(_WORD, SUM_WORDS)
    low, half, zero = (ir.Constant(vector, [n] * SUM_WORDS) for n in (0xFFFFFFFF, 32, 0))
    entry = builder.basic_block
    body, after = builder.append_basic_block("body"), builder.append_basic_block("after")
    pointers = [builder.inttoptr(each, vector.as_pointer()) for each in (data, keys)]
    builder.branch(body)
    builder.position_at_end(body)
    index, total = builder.phi(_WORD), builder.phi(vector)
    word, key = (builder.load(builder.gep(pointer, [index]), align=1) for pointer in pointers)
    first = builder.and_(builder.add(word, key), low)
    second = builder.add(builder.lshr(word, half), builder.lshr(key, half))
    product = builder.mul(first, builder.and_(second, low))
    summed = builder.add(total, builder.add(word, product))
    following = builder.add(index, _WORD(1))
    for value, begun, changed in ((index, _WORD(0), following), (total, zero, summed)):
        value.add_incoming(begun, entry)
        value.add_incoming(changed, body)
    builder.cbranch(builder.icmp_unsigned("<", following, steps), body, after)
    builder.position_at_end(after)
    result, *lanes = (builder.extract_element(summed, _INT(lane)) for lane in range(SUM_WORDS))
    for lane in lanes:
        result = builder.add(result, lane)
    return result


@llvm_intrinsic(types.int64, types.uintp, types.uint64)
def store_word(builder: Any, address: Any, word: Any) -> Any:
    """Store a 64-bit word at any address, aligned or not."""
    builder.store(word, builder.inttoptr(address, _WORD.as_pointer()), align=1)
    return _WORD(0)


@llvm_intrinsic(types.int64, types.uintp)
def prefetch_for_write(builder: Any, address: Any) -> Any:
    """Prefetch memory that is about to change; any address is valid."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])
    declare: Any = cgutils.get_or_insert_function
    function = declare(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, _BYTES), _INT(1), _INT(3), _INT(1)])
    return _WORD(0)
