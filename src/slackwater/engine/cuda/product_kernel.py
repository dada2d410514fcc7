"""Products of few rows, whose speed is that of reading the weight.

The weight's rows are processed by tiles. If there are too few tiles to fill the device, the depth
is cut into parts, whose sums the next kernel adds up. Every program starts to read its slice of the
weight while the predecessor still runs.
"""

# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

import os
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from slackwater.engine.cuda.early_start import early_start, let_successor_start, starts_early

# Off by default: it speeds up steps of the base more than steps of adapters, whose targets are
# relative to the base (docs/results/gpu.md).
FEW_ROWS = 32 if os.environ.get("SLACKWATER_OWN_PRODUCTS") == "1" else 0
_FILLED = 0.6  # this share of the multiprocessors saturates the memory bandwidth
_MOST_PARTS = 8
_WARPS, _STAGES = 4, 5


@dataclass(frozen=True, slots=True)
class Tiling:
    """A product's division: tiles of `columns`; depth in `parts`, read in `pieces` of `step`."""

    columns: int
    step: int
    pieces: int
    parts: int


_TILES = (Tiling(64, 128, 1, 1), Tiling(128, 64, 2, 1))


@triton.jit
def _zero_after_wait(start):
    """0, computed after the predecessor has ended: added to an address, it delays the read."""
    return tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0; // $1",
        "=r,r",
        [start],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows"])  # else a compilation for numbers of another kind
def product_kernel(
    x, weight, bias, out, rows, columns,
    DEPTH: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PIECES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """`out[part, row, column]`: the sum over this part of the depth, the bias in the first part."""
    if EARLY:
        let_successor_start()
    part = tl.program_id(1)
    span: tl.constexpr = DEPTH // PARTS
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, STEP)
    line = tl.minimum(n, columns - 1).to(tl.int64) * DEPTH + part * span
    from_weight = weight + line[:, None] + k[None, :]
    from_x = x + tl.minimum(m, rows - 1)[None, :] * DEPTH + part * span + k[:, None]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, span, STEP * PIECES):
        mine = ()
        for piece in tl.static_range(PIECES):
            mine = mine + (tl.load(from_weight + start + piece * STEP),)  # noqa: RUF005
        at = start
        if EARLY:
            at = start + _zero_after_wait(start) * STEP
        for piece in tl.static_range(PIECES):
            total = tl.dot(mine[piece], tl.load(from_x + at + piece * STEP), total)
    if BIAS:
        more = tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)
        total += tl.where(part == 0, more, 0.0)[:, None]
    inside = (n < columns)[:, None] & (m < rows)[None, :]
    place = out + (part * rows + m)[None, :].to(tl.int64) * columns + n[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def tiling(columns: int, depth: int, processors: int) -> Tiling | None:
    """One program per multiprocessor with all its shared memory; None if many would idle."""
    for tile in _TILES:
        tiles = triton.cdiv(columns, tile.columns)
        cuts = [
            parts
            for parts in range(1, _MOST_PARTS + 1)
            if depth % (parts * tile.step * tile.pieces) == 0 and tiles * parts <= processors
        ]
        if cuts and tiles * cuts[-1] >= _FILLED * processors:
            return replace(tile, parts=cuts[-1])
    return None


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None, how: Tiling) -> Tensor:
    """`[parts, rows, columns]`; the reader adds the parts up. fp32 if there are several."""
    (rows, depth), columns = x.shape, len(weight)
    kind = torch.float32 if how.parts > 1 else x.dtype
    out = torch.empty(how.parts, rows, columns, dtype=kind, device=x.device)
    product_kernel[(triton.cdiv(columns, how.columns), how.parts)](
        x, weight, x if bias is None else bias, out, rows, columns,
        DEPTH=depth, PARTS=how.parts, BIAS=bias is not None, ROWS=16 if rows <= 16 else 32,
        COLUMNS=how.columns, STEP=how.step, PIECES=how.pieces,
        num_warps=_WARPS, num_stages=_STAGES, **early_start(True),
    )  # fmt: skip
    return out


@lru_cache(maxsize=1)
def processors() -> int:
    """The device's multiprocessors; 8 in the interpreter, 0 if a tile does not fit the device."""
    if not torch.cuda.is_available():
        return 8
    device = torch.cuda.get_device_properties(0)
    return int(device.multi_processor_count) if starts_early() else 0
