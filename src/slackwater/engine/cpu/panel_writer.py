"""Writes weight rows into panels of 32 columns, by squares of 16 that are transposed in registers.

Versions are written while steps run. Stores past the caches do not evict the weights that the steps
read, and do not read memory first. A version is written in one call: each call needs the
interpreter's lock, which delays the steps.
"""

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.np.numpy_support import carray
from torch import Tensor

from slackwater.engine.cpu.compiled import llvm_intrinsic
from slackwater.engine.cpu.panel_kernel import PANEL
from slackwater.engine.cpu.vector_code import FLOAT, INT32, INT64, LANES, VECTOR, Value

LINE = 64  # bytes; panels that begin a line are written past the caches
_pointer_to: Any = types.CPointer
_FLOATS = _pointer_to(types.float32)
_MASK = ir.VectorType(INT32, LANES)


def _transpose(builder: Any, rows: list[Value]) -> list[Value]:
    """Transpose 16 vectors: swap the two off-diagonal blocks, for blocks of growing size."""
    for size in (1, 2, 4, 8):
        turned = list(rows)
        for upper in (number for number in range(LANES) if not number & size):
            lower = upper | size
            left = [LANES + (n ^ size) if n & size else n for n in range(LANES)]
            right = [LANES + n if n & size else n | size for n in range(LANES)]
            for number, mask in ((upper, left), (lower, right)):
                pair = (rows[upper], rows[lower], ir.Constant(_MASK, mask))
                turned[number] = builder.shuffle_vector(*pair)
        rows = turned
    return rows


@llvm_intrinsic(types.void, types.uintp, types.uintp, types.uintp)
def _write_square(builder: Any, source: Any, stride: Any, target: Any) -> None:
    """16 floats of 16 rows, `stride` bytes apart, as 16 panel columns; `target` begins a line."""

    def vector_at(start: Value, offset: Value) -> Value:
        return builder.inttoptr(builder.add(start, offset), VECTOR.as_pointer())

    rows = [
        builder.load(vector_at(source, builder.mul(stride, INT64(row))), align=4)
        for row in range(LANES)
    ]
    for number, column in enumerate(_transpose(builder, rows)):
        stored = builder.store(column, vector_at(target, INT64(4 * PANEL * number)), align=LINE)
        stored.set_metadata("nontemporal", builder.module.add_metadata([INT32(1)]))


@llvm_intrinsic(types.void)
def _fence_stores(builder: Any) -> None:
    """Make non-temporal stores visible before the write is reported as done."""
    builder.fence("seq_cst")


@llvm_intrinsic(_FLOATS, types.uintp)
def _floats_at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, FLOAT.as_pointer())


@numba.njit(cache=True, error_model="numpy", nogil=True)
def write_panels(values: Any, panels: Any, first: int) -> None:
    """Write `values`, rows of the weight, from row `first` on."""
    rows, depth = values.shape
    in_line = panels.ctypes.data % LINE == 0 and values.strides[1] == 4
    stride, row = values.strides[0], 0
    while row < rows:
        number, place = (first + row) // PANEL, (first + row) % PANEL
        count = min(PANEL - place, rows - row)
        turned = 0
        if count == PANEL and in_line:
            turned = depth - depth % LANES
            for k in range(0, turned, LANES):
                for half in range(0, PANEL, LANES):
                    _write_square(
                        np.uintp(values.ctypes.data + (row + half) * stride + 4 * k),
                        np.uintp(stride),
                        np.uintp(panels.ctypes.data + 4 * ((number * depth + k) * PANEL + half)),
                    )
        for k in range(turned, depth):
            for j in range(count):
                panels[number, k, place + j] = values[row + j, k]
        row += count
    _fence_stores()


@numba.njit(cache=True, error_model="numpy", nogil=True)  # steps run meanwhile
def _write_all(jobs: Any) -> None:
    for number in range(len(jobs)):
        source, target = (
            _floats_at(np.uintp(jobs[number, 0])),
            _floats_at(np.uintp(jobs[number, 1])),
        )
        rows, depth, first = jobs[number, 2], jobs[number, 3], jobs[number, 4]
        if depth == 0:
            given, taken = carray(source, rows), carray(target, rows)
            for i in range(rows):
                taken[i] = given[i]
        else:
            panels = (-(-(first + rows) // PANEL), depth, PANEL)
            write_panels(carray(source, (rows, depth)), carray(target, panels), first)


class PanelWriter:
    """Collects weights and writes them in one call, in order, without the interpreter's lock."""

    def __init__(self) -> None:
        self._jobs: list[tuple[int, int, int, int, int]] = []
        self._sources: list[Tensor] = []  # keeps the memory alive until `run` has read it

    def add_copy(self, values: Tensor, target: Tensor) -> None:
        assert target.is_contiguous() and target.dtype == torch.float32
        self._add(values, target, values.numel(), 0, 0)

    def add_panels(self, values: Tensor, panels: Tensor, first: int) -> None:
        """Write `values` as the rows, from `first` on, of a weight in panels."""
        rows, depth = values.shape
        count, panel_depth, _ = panels.shape
        assert depth == panel_depth and first + rows <= count * PANEL
        self._add(values, panels, rows, depth, first)

    def run(self) -> None:
        if self._jobs:
            _write_all(np.array(self._jobs, np.int64))
        self._jobs.clear()
        self._sources.clear()

    def _add(self, values: Tensor, target: Tensor, rows: int, depth: int, first: int) -> None:
        assert values.dtype == torch.float32
        if not values.is_contiguous():
            values = values.contiguous()
        self._sources.append(values)
        self._jobs.append((values.data_ptr(), target.data_ptr(), rows, depth, first))
