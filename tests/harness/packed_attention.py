"""Causal attention over a packed batch of whole sequences: what engines and trainers are compared
with.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


class PackedCausalAttention:
    """Causal attention within each of several sequences laid one after the other.

    Differentiable. `cu_seqlens` holds the starts and, last, the total: `(0, 5, 9)` is two
    sequences of 5 and 4. Sequences of about one length share one call, padded on the right:
    a causal row never looks at what comes after it, so the padding needs no mask.
    """

    def __init__(self, cu_seqlens: Sequence[int], device: torch.device | str = "cpu") -> None:
        starts = list(cu_seqlens)
        self._total = starts[-1]
        groups: dict[int, list[tuple[int, int]]] = {}
        for start, stop in pairwise(starts):
            groups.setdefault((stop - start + 15) // 16, []).append((start, stop))
        self._groups = [_Group(spans, torch.device(device)) for spans in groups.values()]
        order = torch.cat([group.rows[group.kept] for group in self._groups])
        self._inverse: Tensor | None = torch.empty_like(order)
        self._inverse[order] = torch.arange(len(order), device=order.device)
        if torch.equal(order, torch.arange(self._total, device=order.device)):
            self._inverse = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        del layer
        repeat = q.shape[1] // k.shape[1]
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        parts = [group.attend(q, k, v) for group in self._groups]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined if self._inverse is None else joined.index_select(0, self._inverse)


class _Group:
    """Sequences of nearly one length, as a padded batch."""

    def __init__(self, spans: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.count = len(spans)
        self.length = max(stop - start for start, stop in spans)
        offsets = torch.arange(self.length)
        starts = torch.tensor([start for start, _ in spans])
        lengths = torch.tensor([stop - start for start, stop in spans])
        clamped = torch.minimum(offsets[None, :], (lengths - 1)[:, None])
        self.rows = (starts[:, None] + clamped).flatten().to(device)
        self.kept = (offsets[None, :] < lengths[:, None]).flatten().nonzero().flatten().to(device)
        self._whole = len(self.kept) == len(self.rows)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = (self.count, self.length, q.shape[1], q.shape[2])
        q, k, v = (x.index_select(0, self.rows).view(shape).transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        flat = out.transpose(1, 2).reshape(-1, shape[2], shape[3])
        return flat if self._whole else flat.index_select(0, self.kept)
