"""Products with a weight stored in panels of 32 columns, each result one chain of fused multiply-adds.

A panel is `[depth, 32]`: what a product reads of it lies in a row. A tile of a few rows keeps its results in registers
while the panel streams by once. The chain of a result runs over the depth in order whatever the number of rows and of
threads, so a row's bits depend on nothing but the row; a library picks its order of summation by the number of rows.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from slackwater.engine.cpu.compiled import generated

PANEL = 32
_LANES = 16
_VECTORS = PANEL // _LANES
# As many rows as their results and two vectors of the panel leave registers for.
MOST_ROWS = 12 if binding.get_host_cpu_features().get("avx512f") else 3
_ROWS_FLOATS = 1 << 18  # rows that go through all panels at a time: they stay in the second cache
_AHEAD_FLOATS = 2048  # of a panel, fetched before they are needed

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_VECTOR = ir.VectorType(_FLOAT, _LANES)
_FMA = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
_declare: Any = cgutils.get_or_insert_function
_PREFETCH = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])


class _Tile:
    """The code of `rows` rows times one panel; addresses are integers, strides in floats."""

    def __init__(self, builder: Any, rows: int, arguments: Any) -> None:
        self._builder, self._rows = builder, rows
        self._x, self._x_stride, self._panel, self._depth = arguments[:4]
        self._out, self._out_stride, self._adds = arguments[4:]
        module = builder.module
        self._fma = _declare(module, _FMA, f"llvm.fma.v{_LANES}f32")
        self._prefetch = _declare(module, _PREFETCH, "llvm.prefetch.p0")

    def build(self, after: Any) -> None:
        """A loop over the depth with all results in registers, then their stores, then `after`."""
        builder, entry = self._builder, self._builder.basic_block
        loop = builder.append_basic_block("depth")
        starts = [self._row(self._x, self._x_stride, row) for row in range(self._rows)]
        targets = [self._row(self._out, self._out_stride, row) for row in range(self._rows)]
        first = [self._first(target) for target in targets]
        panel = builder.inttoptr(self._panel, _FLOAT.as_pointer())
        builder.branch(loop)
        builder.position_at_end(loop)
        place = builder.phi(_INT64)
        place.add_incoming(_INT64(0), entry)
        sums = [[builder.phi(_VECTOR) for _ in range(_VECTORS)] for _ in range(self._rows)]
        further = self._one_deeper(place, starts, panel, sums)
        following = builder.add(place, _INT64(1))
        place.add_incoming(following, loop)
        for total, begun, added in zip(_flat(sums), _flat(first), _flat(further), strict=True):
            total.add_incoming(begun, entry)
            total.add_incoming(added, loop)
        stores = builder.append_basic_block("stores")
        builder.cbranch(builder.icmp_unsigned("<", following, self._depth), loop, stores)
        builder.position_at_end(stores)
        for target, results in zip(targets, further, strict=True):
            for vector, result in enumerate(results):
                builder.store(result, self._vector(target, _INT64(vector * _LANES)), align=4)
        builder.branch(after)

    def _one_deeper(self, place: Any, starts: Any, panel: Any, sums: Any) -> list[list[Any]]:
        builder = self._builder
        corner = builder.mul(place, _INT64(PANEL))
        weights = []
        for vector in range(_VECTORS):
            at = builder.add(corner, _INT64(vector * _LANES))
            weights.append(builder.load(self._vector(panel, at), align=4))
            ahead = builder.gep(panel, [builder.add(at, _INT64(_AHEAD_FLOATS))])
            read, keep, data = _INT32(0), _INT32(3), _INT32(1)
            builder.call(self._prefetch, [builder.bitcast(ahead, _BYTES), read, keep, data])
        further = []
        for start, totals in zip(starts, sums, strict=True):
            value = self._everywhere(builder.load(builder.gep(start, [place])))
            pairs = zip(weights, totals, strict=True)
            further.append([builder.call(self._fma, [value, w, total]) for w, total in pairs])
        return further

    def _first(self, target: Any) -> list[Any]:
        """What a row's chains begin with: what is there already, or nothing."""
        zero = ir.Constant(_VECTOR, [0.0] * _LANES)
        there = [
            self._builder.load(self._vector(target, _INT64(vector * _LANES)), align=4)
            for vector in range(_VECTORS)
        ]
        adds = self._builder.icmp_unsigned("!=", self._adds, _INT64(0))
        return [self._builder.select(adds, vector, zero) for vector in there]

    def _row(self, start: Any, stride: Any, row: int) -> Any:
        offset = self._builder.mul(stride, _INT64(4 * row))
        return self._builder.inttoptr(self._builder.add(start, offset), _FLOAT.as_pointer())

    def _vector(self, start: Any, place: Any) -> Any:
        return self._builder.bitcast(self._builder.gep(start, [place]), _VECTOR.as_pointer())

    def _everywhere(self, value: Any) -> Any:
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        one = self._builder.insert_element(undefined, value, _INT32(0))
        mask = ir.Constant(ir.VectorType(_INT32, _LANES), [0] * _LANES)
        return self._builder.shuffle_vector(one, undefined, mask)


def _flat(rows: list[list[Any]]) -> list[Any]:
    return [vector for row in rows for vector in row]


@generated
def _tile(
    typing: Any, rows: Any, x: Any, x_stride: Any, panel: Any, depth: Any, out: Any,
    out_stride: Any, adds: Any,
) -> Any:  # fmt: skip
    """`out[:rows, :32] = x[:rows] @ panel`, or `+=`, for 1 to MOST_ROWS rows: one piece of code for each number."""
    del typing, rows, x, x_stride, panel, depth, out, out_stride, adds

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        after = builder.append_basic_block("after")
        choice = builder.switch(arguments[0], after)
        for count in range(1, MOST_ROWS + 1):
            block = builder.append_basic_block(f"rows{count}")
            choice.add_case(_INT64(count), block)
            builder.position_at_end(block)
            _Tile(builder, count, arguments[1:]).build(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*([types.uintp] * 8)), build


@numba.njit(cache=True, nogil=True, error_model="numpy")
def panel_product(x: Any, panels: Any, first: int, last: int, out: Any, adds: int) -> None:
    """The columns of panels `first` to `last` of `out = x @ weight.T`, or `out += ...` where `adds` is 1.

    The rows of `x` and of `out` are contiguous, each within itself.
    """
    rows, depth = x.shape
    width = out.shape[1]
    x_stride, out_stride = x.strides[0] // 4, out.strides[0] // 4
    edge = np.zeros((MOST_ROWS, PANEL), np.float32)
    together = max(_ROWS_FLOATS // depth, MOST_ROWS)
    for begin in range(0, rows, together):
        end = min(begin + together, rows)
        tiles = (end - begin + MOST_ROWS - 1) // MOST_ROWS
        for number in range(first, last):
            panel = panels.ctypes.data + number * depth * PANEL * 4
            left = width - number * PANEL
            row = begin
            for tile in range(tiles):
                count = (end - row + tiles - tile - 1) // (tiles - tile)
                start = x.ctypes.data + row * x_stride * 4
                if left >= PANEL:
                    target = out.ctypes.data + (row * out_stride + number * PANEL) * 4
                    _tile(count, start, x_stride, panel, depth, target, out_stride, adds)
                else:
                    edge[:count, :left] = out[row : row + count, width - left :]
                    _tile(count, start, x_stride, panel, depth, edge.ctypes.data, PANEL, adds)
                    out[row : row + count, width - left :] = edge[:count, :left]
                row += count


@numba.njit(cache=True, error_model="numpy")
def write_panels(values: Any, panels: Any, first: int) -> None:
    """Put `values`, rows of the weight, in place from row `first` on."""
    rows, depth = values.shape
    row = 0
    while row < rows:
        number, place = (first + row) // PANEL, (first + row) % PANEL
        count = min(PANEL - place, rows - row)
        for k in range(depth):
            for j in range(count):
                panels[number, k, place + j] = values[row + j, k]
        row += count
