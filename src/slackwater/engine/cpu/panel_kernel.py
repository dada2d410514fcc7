"""Products with a weight in panels of 32 columns, by chains of fused multiply-adds.

A panel is `[depth, 32]` and is read sequentially. A tile of a few rows keeps its results in
registers while the panel streams by once. Each result is summed over the depth in order, so a row's
bits depend on nothing but the row; a BLAS library picks its order by the number of rows.
"""

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import binding
from numba import types

from slackwater.engine.cpu.compiled import llvm_intrinsic
from slackwater.engine.cpu.vector_code import INT64, LANES, Value, VectorCode

PANEL = 32
_VECTORS = PANEL // LANES
# As many rows as fit the registers, beside two vectors of the panel.
MOST_ROWS = 12 if binding.get_host_cpu_features().get("avx512f") else 3
_ROWS_FLOATS = 1 << 18  # rows that go through all panels together: they stay in the L2 cache
_AHEAD_FLOATS = 2048  # prefetch distance within a panel


def _write_tile(code: VectorCode, rows: int, arguments: Sequence[Value]) -> None:
    """Write the code of `rows` rows times one panel: accumulate over the depth, then store."""
    builder = code.builder
    x, x_stride, panel, depth, out, out_stride, adds = arguments
    sources = [code.floats(_row(builder, x, x_stride, row)) for row in range(rows)]
    targets = [code.floats(_row(builder, out, out_stride, row)) for row in range(rows)]
    weights = code.floats(panel)
    places = [INT64(vector * LANES) for vector in range(_VECTORS)]
    is_begun = builder.icmp_unsigned("!=", adds, INT64(0))
    first = [
        builder.select(is_begun, code.load(target, place), code.zero())
        for target in targets
        for place in places
    ]

    def deeper(k: Value, sums: Sequence[Value]) -> list[Value]:
        corner = builder.mul(k, INT64(PANEL))
        columns = []
        for place in places:
            at = builder.add(corner, place)
            columns.append(code.load(weights, at))
            code.prefetch(weights, builder.add(at, INT64(_AHEAD_FLOATS)))
        further = []
        for row, source in enumerate(sources):
            value = code.broadcast(source, k)
            for vector, column in enumerate(columns):
                further.append(code.multiply_add(value, column, sums[row * _VECTORS + vector]))
        return further

    totals = code.loop(depth, first, deeper)
    for row, target in enumerate(targets):
        for vector, place in enumerate(places):
            code.store(totals[row * _VECTORS + vector], target, place)


def _row(builder: Any, start: Value, stride: Value, row: int) -> Value:
    return builder.add(start, builder.mul(stride, INT64(4 * row)))


@llvm_intrinsic(types.void, *([types.uintp] * 8))
def _tile(
    builder: Any, rows: Any, x: Any, x_stride: Any, panel: Any, depth: Any, out: Any,
    out_stride: Any, adds: Any,
) -> None:  # fmt: skip
    """`out[:rows, :32] = x[:rows] @ panel`, or `+=`; each row count has its own code."""
    after = builder.append_basic_block("tile_done")
    choice = builder.switch(rows, after)
    for count in range(1, MOST_ROWS + 1):
        block = builder.append_basic_block(f"rows{count}")
        choice.add_case(INT64(count), block)
        builder.position_at_end(block)
        written = (x, x_stride, panel, depth, out, out_stride, adds)
        _write_tile(VectorCode(builder), count, written)
        builder.branch(after)
    builder.position_at_end(after)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def panel_product(x: Any, panels: Any, first: int, last: int, out: Any, adds: int) -> None:
    """Panels `first` to `last` of `out = x @ weight.T`, `+=` where `adds`; rows are contiguous."""
    rows, depth = x.shape
    width = out.shape[1]
    x_stride, out_stride = x.strides[0] // 4, out.strides[0] // 4
    edge = np.zeros((MOST_ROWS, PANEL), np.float32)
    together = max(_ROWS_FLOATS // depth, MOST_ROWS)
    parts = (rows + together - 1) // together
    for part in range(parts):
        begin, end = rows * part // parts, rows * (part + 1) // parts
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
                    # Element by element: slice copies take numba seconds longer to compile.
                    for i in range(count):
                        for j in range(left):
                            edge[i, j] = out[row + i, width - left + j]
                    _tile(count, start, x_stride, panel, depth, edge.ctypes.data, PANEL, adds)
                    for i in range(count):
                        for j in range(left):
                            out[row + i, width - left + j] = edge[i, j]
                row += count
