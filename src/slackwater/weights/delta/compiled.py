"""How the delta codec compiles its loops, and the few instructions that Python has no word for."""

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


def compiled(function: Function) -> Function:
    """Compile once per machine (cached on disk); other threads run meanwhile."""
    decorate: Any = numba.njit(cache=True, nogil=True, error_model="numpy")
    result: Function = decorate(function)
    return result


def generated(function: Callable[..., Any]) -> Any:
    """For code that is given to the compiler as its own instructions instead of as Python."""
    return intrinsic(function)


def _differing(bits: int) -> Any:
    """Which of the 64 elements of `bits` bits at two addresses differ, as one word."""

    def differing(typing: Any, one: Any, other: Any) -> Any:
        del typing, one, other
        vector = ir.VectorType(ir.IntType(bits), LANES)

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            del context, signature
            pointers = [builder.inttoptr(each, vector.as_pointer()) for each in arguments]
            left, right = (builder.load(pointer, align=1) for pointer in pointers)
            return builder.bitcast(builder.icmp_unsigned("!=", left, right), _WORD)

        return types.uint64(types.uintp, types.uintp), build

    return generated(differing)


differing_bytes = _differing(8)
differing_shorts = _differing(16)
differing_words = _differing(32)


@generated
def word_at(typing: Any, address: Any) -> Any:
    """The 64-bit word at any address, aligned or not."""
    del typing, address

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.load(builder.inttoptr(arguments[0], _WORD.as_pointer()), align=1)

    return types.uint64(types.uintp), build


@generated
def trailing_zeros(typing: Any, word: Any) -> Any:
    """Trailing zero bits of a non-zero word."""
    del typing, word

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.uint64), build


@generated
def ones(typing: Any, word: Any) -> Any:
    """Set bits of a word."""
    del typing, word

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), build


SUM_WORDS = 8  # 64-bit words that one step of `keyed_sum` takes


@generated
def keyed_sum(typing: Any, data: Any, keys: Any, steps: Any) -> Any:
    """The sum of `w + low(w + key) * high(w, key)` over `steps` > 0 times 8 words (checksum.py).

    Written as vectors, since the compiler does not vectorize a loop over addresses.
    """
    del typing, data, keys, steps
    vector = ir.VectorType(_WORD, SUM_WORDS)

    def everywhere(value: int) -> Any:
        return ir.Constant(vector, [value] * SUM_WORDS)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        low, half = everywhere(0xFFFFFFFF), everywhere(32)
        entry = builder.basic_block
        body, after = builder.append_basic_block("body"), builder.append_basic_block("after")
        words, keys = (builder.inttoptr(each, vector.as_pointer()) for each in arguments[:2])
        builder.branch(body)
        builder.position_at_end(body)
        index, total = builder.phi(_WORD), builder.phi(vector)
        word, key = (
            builder.load(builder.gep(pointer, [index]), align=1) for pointer in (words, keys)
        )
        first = builder.and_(builder.add(word, key), low)
        second = builder.add(builder.lshr(word, half), builder.lshr(key, half))
        product = builder.mul(first, builder.and_(second, low))
        summed = builder.add(total, builder.add(word, product))
        following = builder.add(index, _WORD(1))
        for value, begun, changed in ((index, _WORD(0), following), (total, everywhere(0), summed)):
            value.add_incoming(begun, entry)
            value.add_incoming(changed, body)
        builder.cbranch(builder.icmp_unsigned("<", following, arguments[2]), body, after)
        builder.position_at_end(after)
        lanes = [builder.extract_element(summed, _INT(lane)) for lane in range(SUM_WORDS)]
        result = lanes[0]
        for lane in lanes[1:]:
            result = builder.add(result, lane)
        return result

    return types.uint64(types.uintp, types.uintp, types.uint64), build


@generated
def put_word(typing: Any, address: Any, word: Any) -> Any:
    """Store a 64-bit word at any address, aligned or not."""
    del typing, address, word

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        pointer = builder.inttoptr(arguments[0], _WORD.as_pointer())
        builder.store(arguments[1], pointer, align=1)
        return _WORD(0)

    return types.int64(types.uintp, types.uint64), build


@generated
def fetch_for_write(typing: Any, address: Any) -> Any:
    """Prefetch memory that is about to change; any address is valid."""
    del typing, address
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        declare: Any = cgutils.get_or_insert_function
        function = declare(builder.module, kind, "llvm.prefetch.p0")
        pointer = builder.inttoptr(arguments[0], _BYTES)
        builder.call(function, [pointer, _INT(1), _INT(3), _INT(1)])
        return _WORD(0)

    return types.int64(types.uintp), build
