"""Flash attention over sequences that share the rows of their common prefixes.

A sequence's own rows look at each other, causally; and at the shared rows before them, all of them.
The two are computed by themselves and joined by their normalisers, forward; backward each runs with
the joined output and normaliser, which gives the exact gradients of the whole. Neighbours that look
at the same shared rows ask together, so those rows are read once.

PyTorch's public `varlen_attn` gives the forward and its normalisers, but its backward takes no
others than its own; so the two operators that it is made of are called here, private names though
they have.
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
    """Rows asked and rows looked at, run by run: where each begins, and the longest."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True, slots=True)
class RunCrossing:
    """Rows `asking` to look at shared rows `seen`, run by run; `once`: each is seen by one run."""

    asking: Tensor
    seen: Tensor
    runs: RowRuns
    once: bool


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
        del layer
        out: Tensor = _attention(q, k, v, self)
        return out


def plan(shared: SharedRows) -> tuple[list[_Piece], list[list[tuple[_Piece, _Piece]]]]:
    """Each sequence's own rows; level by level, which rows ask and which shared ones they see."""
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
    asking, seen = ([pair[side] for pair in pairs] for side in (0, 1))
    rows = [np.concatenate([np.arange(*piece) for piece in side]) for side in (asking, seen)]
    sizes = [np.array([stop - start for start, stop in side]) for side in (asking, seen)]
    starts = [np.concatenate(([0], np.cumsum(each))).astype(np.int32) for each in sizes]
    sent = [torch.from_numpy(part).to(device) for part in (*rows, *starts)]
    runs = RowRuns(sent[2], sent[3], int(sizes[0].max()), int(sizes[1].max()))
    return RunCrossing(sent[0], sent[1], runs, len(np.unique(rows[1])) == len(rows[1]))


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, runs: RowRuns, causal: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Output `[N, heads, d]`, normalisers `[heads, N]`, and what backward wants back."""
    out, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, runs.queries, runs.keys, runs.most_queries, runs.most_keys, 0.0, causal, False
    )
    return out, lse, (seed, unused)


def flash_backward(
    g: Tensor, given: tuple[Tensor, ...], runs: RowRuns, causal: bool, kept: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `given` are those, the output and the normalisers."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        g, *given, runs.queries, runs.keys, runs.most_queries, runs.most_keys, 0.0, causal, *kept
    )
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: FlashSharedAttention) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse, kept = flash_forward(q, k, v, how.own, True)
        all_kept = [*kept]
        (rows, heads, size), lines = q.shape, triton.next_power_of_2(q.shape[1])
        for crossing in how.crossings:
            asked = (q.index_select(0, crossing.asking), *_seen(crossing, k, v))
            other, other_lse, kept = flash_forward(*asked, crossing.runs, False)
            all_kept += kept
            count, joined = len(crossing.asking), lse.clone()
            join_rows[(count,)](
                out,
                lse,
                other,
                other_lse,
                joined,
                crossing.asking,
                count,
                rows,
                HEADS=heads,
                SIZE=size,
                LINES=lines,
                BLOCK=triton.next_power_of_2(size),
                num_warps=4,
            )
            lse = joined
        ctx.save_for_backward(q, k, v, out, lse, *all_kept)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *all_kept = ctx.saved_tensors
        kept = list(zip(all_kept[::2], all_kept[1::2], strict=True))
        how, g = ctx.how, g.contiguous()
        dq, dk, dv = flash_backward(g, (q, k, v, out, lse), how.own, True, kept[0])
        for crossing, state in zip(how.crossings, kept[1:], strict=True):
            asking = crossing.asking
            given = (
                q.index_select(0, asking),
                *_seen(crossing, k, v),
                out.index_select(0, asking),
                lse.index_select(1, asking),
            )
            found = flash_backward(g.index_select(0, asking), given, crossing.runs, False, state)
            _add(dq, found[0], asking, True)
            _add(dk, found[1], crossing.seen, crossing.once)
            _add(dv, found[2], crossing.seen, crossing.once)
        return dq, dk, dv, None


_attention: Any = _Attention.apply


def _seen(crossing: RunCrossing, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k.index_select(0, crossing.seen), v.index_select(0, crossing.seen)


def _add(target: Tensor, more: Tensor, rows: Tensor, once: bool) -> None:
    if not once:
        target.index_add_(0, rows, more)
        return
    columns = target.shape[1] * target.shape[2]
    grid = (len(rows), triton.cdiv(columns, _ADD_BLOCK))
    add_rows[grid](target, more.contiguous(), rows, columns, BLOCK=_ADD_BLOCK, num_warps=4)
