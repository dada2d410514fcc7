"""Causal attention over sequences that share the rows of their common prefixes.

A position's state depends only on earlier positions, so the samples of one prompt need its rows
once. Sequences of similar size form a padded batch; a padded key comes after every query that is
kept, so the causal mask hides it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

SHORT = 128  # up to so many keys, the whole matrix of attention weights is kept for backward
_STEP = 16

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedRows:
    """`rows[i][p]` is the row of position p of sequence i; its own rows begin at `own_from[i]`."""

    tokens: Ints
    positions: Ints
    rows: tuple[Ints, ...]
    own_from: tuple[int, ...]

    @property
    def count(self) -> int:
        return int(self.tokens.shape[0])


def share_prefixes(sequences: Sequence[Ints]) -> SharedRows:
    """One row per token, except for the prefix that a sequence shares with its predecessor."""
    rows: list[Ints] = []
    own_from: list[int] = []
    count = 0
    for sequence, common in zip(sequences, common_with_previous(sequences), strict=True):
        own = np.arange(count, count + len(sequence) - common)
        rows.append(np.concatenate([rows[-1][:common], own]) if common else own)
        own_from.append(common)
        count += len(own)
    parts = list(zip(sequences, own_from, strict=True))
    return SharedRows(
        tokens=np.concatenate([sequence[start:] for sequence, start in parts]),
        positions=np.concatenate([np.arange(start, len(sequence)) for sequence, start in parts]),
        rows=tuple(rows),
        own_from=tuple(own_from),
    )


def common_with_previous(sequences: Sequence[Ints]) -> list[int]:
    """The length of the prefix that each sequence shares with its predecessor."""
    return [
        _common(sequences[number - 1], sequence) if number else 0
        for number, sequence in enumerate(sequences)
    ]


def _common(one: Ints, other: Ints) -> int:
    shorter = min(len(one), len(other))
    differing = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differing[0]) if len(differing) else shorter


class SharedPrefixAttention:
    """One micro-batch's attention, for every layer of a pass."""

    def __init__(self, shared: SharedRows, device: torch.device) -> None:
        sizes: dict[tuple[int, int], list[int]] = {}
        for number, (rows, start) in enumerate(zip(shared.rows, shared.own_from, strict=True)):
            if start < len(rows):
                key = (-(-(len(rows) - start) // _STEP), -(-len(rows) // _STEP))
                sizes.setdefault(key, []).append(number)
        self._buckets = [_Bucket(shared, members, device) for members in sizes.values()]
        order = torch.cat([bucket.own_rows for bucket in self._buckets])
        self._inverse: Tensor | None = None
        if not torch.equal(order, torch.arange(len(order), device=device)):
            self._inverse = torch.empty_like(order)
            self._inverse[order] = torch.arange(len(order), device=device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [bucket.attend(q, k, v) for bucket in self._buckets]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined if self._inverse is None else joined.index_select(0, self._inverse)


class _Bucket:
    """Sequences of similar size as a padded batch: query rows, key rows, and the rows to keep."""

    def __init__(self, shared: SharedRows, members: Sequence[int], device: torch.device) -> None:
        rows = [torch.from_numpy(shared.rows[number]) for number in members]
        starts = torch.tensor([shared.own_from[number] for number in members])
        lengths = torch.tensor([len(part) for part in rows])
        self._queries, self._keys = int((lengths - starts).max()), int(lengths.max())
        table = torch.stack(
            [functional.pad(p, (0, self._keys - len(p)), value=int(p[-1])) for p in rows]
        )
        places = starts[:, None] + torch.arange(self._queries)
        query_positions = torch.minimum(places, (lengths - 1)[:, None])
        kept = (places < lengths[:, None]).flatten()
        self._whole = bool(kept.all())
        self._kept = kept.nonzero().flatten().to(device)
        self._q_rows = table.gather(1, query_positions).flatten().to(device)
        self._k_rows = table.flatten().to(device)
        self.own_rows = self._q_rows[self._kept]
        self._square = int(starts.max()) == 0
        visible = torch.arange(self._keys) <= query_positions[:, :, None]
        same = bool((visible == visible[:1]).all())
        self._visible = (visible[:1] if same else visible).to(device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, size = q.shape[1:]
        q = q.index_select(0, self._q_rows).view(-1, self._queries, heads, size)
        k, v = (x.index_select(0, self._k_rows).view(-1, self._keys, *x.shape[1:]) for x in (k, v))
        if self._keys <= SHORT:
            out: Tensor = _short_attention(q, k, v, self._visible)
        else:
            out = self._long(q, k, v)
        flat = out.reshape(-1, heads, size)
        return flat if self._whole else flat.index_select(0, self._kept)

    def _long(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeat = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeat, 2) if repeat > 1 else x for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = None if self._square else self._visible[:, None]
        out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self._square)
        return out.transpose(1, 2)


class _ShortAttention(torch.autograd.Function):
    """`[batch, positions, heads, size]`; query heads that share a key head are adjacent."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        batch, queries, heads, size = q.shape
        keys, kv_heads = k.shape[1:3]
        ctx.shape = (batch, queries, kv_heads, heads // kv_heads, size)
        grouped, k, v = _to_kv_heads(q, ctx.shape), _flat_heads(k), _flat_heads(v)
        scores = torch.bmm(grouped, k.transpose(1, 2)).mul_(size**-0.5)
        by_query = scores.view(batch, heads, queries, keys)
        by_query.masked_fill_(~visible[:, None], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(grouped, k, v, weights)
        return _from_kv_heads(torch.bmm(weights, v), ctx.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        batch, _, kv_heads, _, size = ctx.shape
        g = _to_kv_heads(g, ctx.shape)
        dv = torch.bmm(weights.transpose(1, 2), g)
        dweights = torch.bmm(g, v.transpose(1, 2)).mul_(weights)
        dscores = dweights.sub_(weights * dweights.sum(-1, keepdim=True)).mul_(size**-0.5)
        dq, dk = torch.bmm(dscores, k), torch.bmm(dscores.transpose(1, 2), q)
        by_head = (batch, kv_heads, -1, size)
        return (
            _from_kv_heads(dq, ctx.shape),
            dk.view(by_head).transpose(1, 2),
            dv.view(by_head).transpose(1, 2),
            None,
        )


_short_attention: Any = _ShortAttention.apply


def _to_kv_heads(x: Tensor, shape: tuple[int, int, int, int, int]) -> Tensor:
    batch, queries, kv_heads, repeat, size = shape
    by_head = x.reshape(batch, queries, kv_heads, repeat, size).permute(0, 2, 3, 1, 4)
    return by_head.reshape(batch * kv_heads, repeat * queries, size)


def _from_kv_heads(x: Tensor, shape: tuple[int, int, int, int, int]) -> Tensor:
    batch, queries, kv_heads, repeat, size = shape
    by_head = x.view(batch, kv_heads, repeat, queries, size).permute(0, 3, 1, 2, 4)
    return by_head.reshape(batch, queries, kv_heads * repeat, size)


def _flat_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
