"""Flash attention over sequences that share the rows of their common prefixes.

A sequence's own rows attend to each other causally, and to all shared rows before them. The two
parts are computed separately. Forward joins them by their normalisers; backward runs each with the
joined output and normaliser, which gives the exact gradients of the whole. Neighbouring sequences
with the same shared rows form one run, so those rows are read once.

PyTorch's public `varlen_attn` returns the normalisers, but its backward accepts only its own. The
two private operators that it consists of are therefore called here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from slackwater.training.cuda.kernels import add_rows, join_rows
from slackwater.training.shared_attention import Ints, SharedRows

_Piece = tuple[int, int]  # rows from, to
_ADD_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class RowRuns:
    """Query rows and key rows by run: where each run begins, and the longest."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True, slots=True)
class RunCrossing:
    """`query_rows` attend to `key_rows`, by run; `unique_keys`: no key row is in two runs."""

    query_rows: Tensor
    key_rows: Tensor
    runs: RowRuns
    unique_keys: bool


class FlashSharedAttention:
    """One micro-batch's attention, for every layer of a pass."""

    def __init__(self, shared: SharedRows, device: torch.device) -> None:
        own, crossings = plan(shared)
        starts = np.array([start for start, _ in own] + [shared.count], np.int32)
        on_device = torch.from_numpy(starts).to(device)
        longest = int(np.diff(starts).max())
        self.own = RowRuns(on_device, on_device, longest, longest)
        self.crossings = [_crossing(pairs, device) for pairs in crossings]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _attention(q, k, v, self)
        return out


def plan(shared: SharedRows) -> tuple[list[_Piece], list[list[tuple[_Piece, _Piece]]]]:
    """Each sequence's own rows; by level, which rows attend to which shared rows."""
    own: list[_Piece] = []
    levels: list[list[tuple[_Piece, _Piece]]] = []
    for rows, start in zip(shared.rows, shared.own_from, strict=True):
        if start == len(rows):
            continue
        mine = (int(rows[start]), int(rows[-1]) + 1)
        own.append(mine)
        for level, piece in enumerate(_pieces(rows[:start])):
            if level == len(levels):
                levels.append([])
            before = levels[level][-1] if levels[level] else None
            if before is not None and before[1] == piece and before[0][1] == mine[0]:
                levels[level][-1] = ((before[0][0], mine[1]), piece)
            else:
                levels[level].append((mine, piece))
    return own, levels


def _pieces(rows: Ints) -> list[_Piece]:
    """Contiguous runs of rows."""
    if not len(rows):
        return []
    edges = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, edges)]


def _crossing(pairs: Sequence[tuple[_Piece, _Piece]], device: torch.device) -> RunCrossing:
    query_rows, key_rows = ([pair[side] for pair in pairs] for side in (0, 1))
    rows = [
        np.concatenate([np.arange(*piece) for piece in side]) for side in (query_rows, key_rows)
    ]
    sizes = [np.array([stop - start for start, stop in side]) for side in (query_rows, key_rows)]
    starts = [np.concatenate(([0], np.cumsum(each))).astype(np.int32) for each in sizes]
    sent = [torch.from_numpy(part).to(device) for part in (*rows, *starts)]
    runs = RowRuns(sent[2], sent[3], int(sizes[0].max()), int(sizes[1].max()))
    return RunCrossing(sent[0], sent[1], runs, len(np.unique(rows[1])) == len(rows[1]))


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, runs: RowRuns, causal: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Output `[N, heads, d]`, normalisers `[heads, N]`, and the state that backward needs."""
    out, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, runs.queries, runs.keys, runs.most_queries, runs.most_keys, 0.0, causal, False
    )
    return out, lse, (seed, unused)


def flash_backward(
    g: Tensor, given: tuple[Tensor, ...], runs: RowRuns, causal: bool, kept: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `given` are q, k, v, the output and the normalisers."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        g, *given, runs.queries, runs.keys, runs.most_queries, runs.most_keys, 0.0, causal, *kept
    )
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: FlashSharedAttention
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse, kept = flash_forward(q, k, v, attention.own, True)
        all_kept = [*kept]
        (rows, heads, size), lines = q.shape, triton.next_power_of_2(q.shape[1])
        for crossing in attention.crossings:
            asked = (q.index_select(0, crossing.query_rows), *_gather_keys(crossing, k, v))
            other, other_lse, kept = flash_forward(*asked, crossing.runs, False)
            all_kept += kept
            count, joined = len(crossing.query_rows), lse.clone()
            join_rows[(count,)](
                out, lse, other, other_lse, joined, crossing.query_rows, count, rows,
                HEADS=heads, SIZE=size, LINES=lines, BLOCK=triton.next_power_of_2(size),
                num_warps=4,
            )  # fmt: skip
            lse = joined
        ctx.save_for_backward(q, k, v, out, lse, *all_kept)
        ctx.attention = attention
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *all_kept = ctx.saved_tensors
        kept = list(zip(all_kept[::2], all_kept[1::2], strict=True))
        attention, g = ctx.attention, g.contiguous()
        dq, dk, dv = flash_backward(g, (q, k, v, out, lse), attention.own, True, kept[0])
        for crossing, state in zip(attention.crossings, kept[1:], strict=True):
            query_rows = crossing.query_rows
            given = (
                q.index_select(0, query_rows),
                *_gather_keys(crossing, k, v),
                out.index_select(0, query_rows),
                lse.index_select(1, query_rows),
            )
            found = flash_backward(
                g.index_select(0, query_rows), given, crossing.runs, False, state
            )
            _add(dq, found[0], query_rows, True)
            _add(dk, found[1], crossing.key_rows, crossing.unique_keys)
            _add(dv, found[2], crossing.key_rows, crossing.unique_keys)
        return dq, dk, dv, None


_attention: Any = _Attention.apply


def _gather_keys(crossing: RunCrossing, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k.index_select(0, crossing.key_rows), v.index_select(0, crossing.key_rows)


def _add(target: Tensor, more: Tensor, rows: Tensor, once: bool) -> None:
    if not once:
        target.index_add_(0, rows, more)
        return
    columns = target.shape[1] * target.shape[2]
    grid = (len(rows), triton.cdiv(columns, _ADD_BLOCK))
    add_rows[grid](target, more.contiguous(), rows, columns, BLOCK=_ADD_BLOCK, num_warps=4)
