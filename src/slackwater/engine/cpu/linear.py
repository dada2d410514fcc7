"""Products with a weight whose rows do not depend on how many rows share the call.

A library's product of M rows picks its kernel, and so its order of summation, by M. Here M comes
from a short ladder of sizes. Before a shape is first used, every size of the ladder is tried on
random numbers; a size whose rows differ in any bit from those of 16 rows is left out, so that
on any library the rows that come out are the same for every batch. A single row takes our own loop
instead, where it finds an order of summation that gives the library's bits.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slackwater.engine.cpu.compiled import compiled

TILE = 16
LADDER = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BIG_WEIGHT = 8 << 20  # elements; above it the ladder stops at 64 rows to keep the trial short
FEW_ROWS = 3
_COLUMNS = 1024  # of a product of several rows: eight rows of the weight then stay in the L1 cache
_NONE, _1, _2, _3, _4, _5, _6, _7, _EIGHT = (np.uint64(i) for i in range(9))
_LONGEST_RUN = 384


@compiled
def _add_eight(
    x: Any, at: Any, w: Any, base: Any, width: Any, part: Any, to: Any, span: Any
) -> None:
    """`part[to:] += x[at : at + 8] @ w[8, span]`: eight terms in order; `base` is their corner."""
    x0, x1, x2, x3 = x[at], x[at + _1], x[at + _2], x[at + _3]
    x4, x5, x6, x7 = x[at + _4], x[at + _5], x[at + _6], x[at + _7]
    for j in range(span):
        s, c = part[to + j], base + j
        s += x0 * w[c]
        s += x1 * w[c + width]
        s += x2 * w[c + _2 * width]
        s += x3 * w[c + _3 * width]
        s += x4 * w[c + _4 * width]
        s += x5 * w[c + _5 * width]
        s += x6 * w[c + _6 * width]
        s += x7 * w[c + _7 * width]
        part[to + j] = s


@compiled
def _put(out: Any, to: Any, part: Any, at: Any, span: Any, add: Any) -> None:
    """Begin or continue a stretch of the result."""
    if add:
        for j in range(span):
            out[to + j] += part[at + j]
    else:
        for j in range(span):
            out[to + j] = part[at + j]


@compiled
def product_of_few_rows(
    x: Any, rows: Any, columns: Any, width: Any, run: Any, out: Any, part: Any, most: Any
) -> None:
    """`out = x @ columns`: each element one chain of fused multiply-adds per `run` of the sum.

    Flat arrays and unsigned offsets, `most` columns at a time: no index needs a check.
    """
    depth = np.uint64(x.shape[0]) // rows
    for left in range(_NONE, width, most):
        span = min(most, width - left)
        for begin in range(_NONE, depth, run):
            end = min(depth, begin + run)
            eight = end - (end - begin) % _EIGHT
            for j in range(rows * span):
                part[j] = np.float32(0)
            for k in range(begin, eight, _EIGHT):
                for m in range(rows):
                    _add_eight(
                        x, m * depth + k, columns, k * width + left, width, part, m * span, span
                    )
            for k in range(eight, end):
                for m in range(rows):
                    x0 = x[m * depth + k]
                    for j in range(span):
                        part[m * span + j] += x0 * columns[k * width + left + j]
            for m in range(rows):
                _put(out, m * width + left, part, m * span, span, begin > _NONE)


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """For one weight shape: row counts that agree bit for bit, and our loop's run, if it agrees."""

    ladder: tuple[int, ...]
    run: int | None


class InvariantLinear:
    """`F.linear` with rows that are the same in every batch. Plans are made once per shape."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, int, bool], ShapePlan] = {}
        self._part = np.empty(FEW_ROWS * _COLUMNS, np.float32)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        by_column = weight.stride(0) == 1
        key = (weight.shape[0], weight.shape[1], by_column)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._tried(*key)
        if plan.run is not None and (rows == 1 or (rows <= FEW_ROWS and rows not in plan.ladder)):
            out = self._few_rows(x, weight, plan.run)
            return out if bias is None else out.add_(bias)
        if rows in plan.ladder:
            out = functional.linear(x, weight)
        elif plan.ladder:
            out = self._in_tiles(x, weight, plan.ladder)
        else:
            assert plan.run is not None, "a shape without a ladder has our own loop"
            pieces = [self._few_rows(part, weight, plan.run) for part in torch.split(x, FEW_ROWS)]
            out = torch.cat(pieces)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def _in_tiles(x: Tensor, weight: Tensor, ladder: tuple[int, ...]) -> Tensor:
        rows, start = x.shape[0], 0
        out = torch.empty(rows, weight.shape[0])
        while start < rows:
            left = rows - start
            size = next((size for size in ladder if size >= left), ladder[-1])
            tile = x[start : start + size]
            if tile.shape[0] < size:
                padded = torch.zeros(size, x.shape[1])
                padded[: tile.shape[0]] = tile
                tile = padded
            taken = min(size, left)
            out[start : start + taken] = functional.linear(tile, weight)[:taken]
            start += taken
        return out

    def _tried(self, width: int, depth: int, by_column: bool) -> ShapePlan:
        most = 64 if width * depth > BIG_WEIGHT else LADDER[-1]
        generator = torch.Generator().manual_seed(width * 1_000_003 + depth)
        weight = torch.rand(width, depth, generator=generator).sub_(0.5)
        if by_column:
            weight = weight.T.contiguous().T
        x = torch.randn(most, depth, generator=generator)
        tiles = [
            functional.linear(x[i : i + TILE].contiguous(), weight) for i in range(0, most, TILE)
        ]
        reference = torch.cat(tiles)
        ladder = [size for size in LADDER if size <= most and _agrees(x, weight, reference, size)]
        if TILE not in ladder:  # this library's rows depend on their place: leave it aside
            return ShapePlan((), depth)
        run = self._matching_run(x[:FEW_ROWS], weight, reference[:FEW_ROWS]) if by_column else None
        return ShapePlan(tuple(ladder), run)

    def _matching_run(self, x: Tensor, weight: Tensor, reference: Tensor) -> int | None:
        """A length of run for which our loop gives the library's bits, if any does."""
        depth = weight.shape[1]
        parts = -(-depth // _LONGEST_RUN)
        even = -(-depth // parts)
        candidates = [depth, even, *(-(-even // m) * m for m in (4, 8, 16, 32)), _LONGEST_RUN, 256]
        for run in dict.fromkeys(candidates):
            alone = self._few_rows(x[:1], weight, run)
            if torch.equal(self._few_rows(x, weight, run), reference) and torch.equal(
                alone, reference[:1]
            ):
                return run
        return None

    def _few_rows(self, x: Tensor, weight: Tensor, run: int) -> Tensor:
        rows, width = x.shape[0], weight.shape[0]
        out = torch.empty(rows, width)
        most = width if rows == 1 else _COLUMNS
        if len(self._part) < rows * most:
            self._part = np.empty(rows * most, np.float32)
        product_of_few_rows(
            x.reshape(-1).numpy(),
            np.uint64(rows),
            weight.T.reshape(-1).numpy(),
            np.uint64(width),
            np.uint64(run),
            out.view(-1).numpy(),
            self._part,
            np.uint64(most),
        )
        return out


def _agrees(x: Tensor, weight: Tensor, reference: Tensor, size: int) -> bool:
    """Whether products of `size` rows, wherever the rows are taken from, have the reference's bits."""
    for start in {0, x.shape[0] - size, (x.shape[0] - size) // 2}:
        rows = slice(start, start + size)
        if not torch.equal(functional.linear(x[rows].contiguous(), weight), reference[rows]):
            return False
    return True
