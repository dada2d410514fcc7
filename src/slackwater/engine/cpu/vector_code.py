"""LLVM instructions on vectors of 16 floats, for loops with a fixed order of summation and fixed
use of registers. The compiler splits a vector to the machine's width; addresses are integers.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils

LANES = 16
FLOAT, INT32, INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
_BYTES = ir.IntType(8).as_pointer()
_PREFETCH = ir.FunctionType(ir.VoidType(), [_BYTES, INT32, INT32, INT32])
_declare: Any = cgutils.get_or_insert_function

Value: TypeAlias = Any  # an instruction's result; llvmlite has no types
Step: TypeAlias = Callable[[Value, Sequence[Value]], list[Value]]


class VectorCode:
    """Writes instructions at the position of `builder`."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def floats(self, address: Value) -> Value:
        return self.builder.inttoptr(address, FLOAT.as_pointer())

    def load(self, floats: Value, place: Value) -> Value:
        """The 16 floats from `place` on."""
        return self.builder.load(self._vector_pointer(floats, place), align=4)

    def store(self, vector: Value, floats: Value, place: Value) -> None:
        self.builder.store(vector, self._vector_pointer(floats, place), align=4)

    def broadcast(self, floats: Value, place: Value) -> Value:
        """The float at `place`, in all lanes."""
        value = self.builder.load(self.builder.gep(floats, [place]))
        undefined = ir.Constant(VECTOR, ir.Undefined)
        one = self.builder.insert_element(undefined, value, INT32(0))
        mask = ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES)
        return self.builder.shuffle_vector(one, undefined, mask)

    def zero(self) -> Value:
        return ir.Constant(VECTOR, [0.0] * LANES)

    def multiply_add(self, one: Value, other: Value, total: Value) -> Value:
        """`one * other + total`, rounded once."""
        return self._call("llvm.fma", one, other, total)

    def maximum(self, one: Value, other: Value) -> Value:
        return self._call("llvm.maxnum", one, other)

    def prefetch(self, floats: Value, place: Value) -> None:
        """Ask for the memory at `place`, which may lie beyond the end."""
        address = self.builder.bitcast(self.builder.gep(floats, [place]), _BYTES)
        function = _declare(self.builder.module, _PREFETCH, "llvm.prefetch.p0")
        self.builder.call(function, [address, INT32(0), INT32(3), INT32(1)])

    def loop(self, count: Value, first: Sequence[Value], step: Step) -> list[Value]:
        """`values = step(i, values)` for i from 0 to `count`, which is above 0; the last values."""
        builder, entry = self.builder, self.builder.basic_block
        body, after = builder.append_basic_block("body"), builder.append_basic_block("after")
        builder.branch(body)
        builder.position_at_end(body)
        index = builder.phi(INT64)
        values = [builder.phi(value.type) for value in first]
        further = step(index, values)
        following = builder.add(index, INT64(1))
        pairs = zip([index, *values], [INT64(0), *first], [following, *further], strict=True)
        for value, begun, changed in pairs:
            value.add_incoming(begun, entry)
            value.add_incoming(changed, builder.basic_block)
        builder.cbranch(builder.icmp_unsigned("<", following, count), body, after)
        builder.position_at_end(after)
        return further

    def reduce_lanes(self, vector: Value, join: Callable[[Value, Value], Value]) -> Value:
        """Join the upper half of the lanes with the lower half until one is left."""
        for half in (8, 4, 2, 1):
            order = [(lane + half) % LANES for lane in range(LANES)]
            mask = ir.Constant(ir.VectorType(INT32, LANES), order)
            vector = join(vector, self.builder.shuffle_vector(vector, vector, mask))
        return self.builder.extract_element(vector, INT32(0))

    def _vector_pointer(self, floats: Value, place: Value) -> Value:
        return self.builder.bitcast(self.builder.gep(floats, [place]), VECTOR.as_pointer())

    def _call(self, name: str, *vectors: Value) -> Value:
        kind = ir.FunctionType(VECTOR, [VECTOR] * len(vectors))
        function = _declare(self.builder.module, kind, f"{name}.v{LANES}f32")
        return self.builder.call(function, vectors)
