"""Products with a weight whose rows do not depend on how many rows share the call.

A library's product of M rows picks its kernel, and so its order of summation, by M. Here M comes
from a short ladder of sizes. Before a shape is first used, every size of the ladder is tried on
random numbers; a size whose rows differ in any bit from those of the smallest is left out, so
that on any library the rows that come out are the same for every batch. Very few rows take our own
loop instead, where it finds an order of summation that gives the library's bits.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slackwater.engine.cpu.compiled import compiled

TILE = 16
LADDER = (16, 32, 48, 64, 96, 128, 192, 256)
BIG_WEIGHT = 8 << 20  # elements; above it the ladder stops at 64 rows to keep the trial short
FEW_ROWS = 4
COLUMNS = 2048
_LONGEST_RUN = 384


@compiled
def _add_run(x: Any, columns: Any, left: int, begin: int, end: int, partial: Any) -> None:
    """`partial += x[:, begin:end] @ columns[begin:end, left:]`, four terms at a time, in order."""
    rows, span = partial.shape
    four = end - (end - begin) % 4
    for k in range(begin, four, 4):
        w0 = columns[k, left : left + span]
        w1 = columns[k + 1, left : left + span]
        w2 = columns[k + 2, left : left + span]
        w3 = columns[k + 3, left : left + span]
        for m in range(rows):
            x0, x1, x2, x3 = x[m, k], x[m, k + 1], x[m, k + 2], x[m, k + 3]
            chain = partial[m]
            for j in range(span):
                s = chain[j]
                s += x0 * w0[j]
                s += x1 * w1[j]
                s += x2 * w2[j]
                s += x3 * w3[j]
                chain[j] = s
    for k in range(four, end):
        w0 = columns[k, left : left + span]
        for m in range(rows):
            x0 = x[m, k]
            chain = partial[m]
            for j in range(span):
                chain[j] += x0 * w0[j]


@compiled
def product_of_few_rows(x: Any, columns: Any, run: int, out: Any, scratch: Any) -> None:
    """`out = x @ columns`: each element one chain of fused multiply-adds per `run` of the sum."""
    rows, depth = x.shape
    width = columns.shape[1]
    for left in range(0, width, COLUMNS):
        span = min(COLUMNS, width - left)
        for begin in range(0, depth, run):
            partial = scratch[:rows, :span]
            partial[:] = np.float32(0)
            _add_run(x, columns, left, begin, min(depth, begin + run), partial)
            for m in range(rows):
                target, chain = out[m, left : left + span], partial[m]
                if begin == 0:
                    for j in range(span):
                        target[j] = chain[j]
                else:
                    for j in range(span):
                        target[j] += chain[j]


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """For one weight shape: row counts that agree bit for bit, and our loop's run, if it agrees."""

    ladder: tuple[int, ...]
    run: int | None


class InvariantLinear:
    """`F.linear` with rows that are the same in every batch. Plans are made once per shape."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, int, bool], ShapePlan] = {}
        self._partial = np.empty((FEW_ROWS, COLUMNS), np.float32)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        by_column = weight.stride(0) == 1
        key = (weight.shape[0], weight.shape[1], by_column)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._tried(*key)
        if rows <= FEW_ROWS and plan.run is not None:
            out = torch.empty(rows, weight.shape[0])
            product_of_few_rows(x.numpy(), weight.T.numpy(), plan.run, out.numpy(), self._partial)
            return out if bias is None else out.add_(bias)
        if rows in plan.ladder:
            out = functional.linear(x, weight)
        else:
            out = self._in_tiles(x, weight, plan.ladder)
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
        ladder = [TILE]
        for size in LADDER[1:]:
            if size > most:
                break
            first = functional.linear(x[:size].contiguous(), weight)
            last = functional.linear(x[most - size :].contiguous(), weight)
            if torch.equal(first, reference[:size]) and torch.equal(last, reference[most - size :]):
                ladder.append(size)
        run = self._matching_run(x[:FEW_ROWS], weight, reference[:FEW_ROWS]) if by_column else None
        return ShapePlan(tuple(ladder), run)

    def _matching_run(self, x: Tensor, weight: Tensor, reference: Tensor) -> int | None:
        """A length of run for which our loop gives the library's bits, if any does."""
        depth = weight.shape[1]
        parts = -(-depth // _LONGEST_RUN)
        even = -(-depth // parts)
        candidates = [depth, even, *(-(-even // m) * m for m in (4, 8, 16, 32)), _LONGEST_RUN, 256]
        out = np.empty(reference.shape, np.float32)
        for run in dict.fromkeys(candidates):
            product_of_few_rows(x.numpy(), weight.T.numpy(), run, out, self._partial)
            if np.array_equal(out, reference.numpy()):
                return run
        return None
