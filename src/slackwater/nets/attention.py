"""Attention is passed into the model."""

from typing import Protocol

from torch import Tensor


class Attention(Protocol):
    """Sees one layer's queries, keys and values of all rows, and may keep keys and values."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [N, heads, d]`, `k`, `v [N, kv_heads, d]` to `[N, heads, d]`."""
        ...
