"""The arithmetic of a layer apart from attention: plain, differentiable, on any device.

The engine replaces it by fused or batch-invariant forms with the same meaning.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class NetOps(Protocol):
    """Rows are tokens: `[N, ...]` in, `[N, ...]` out."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`(norm(x + residual), x + residual)`."""
        ...

    def rotate(
        self,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Norm each head where a weight is given, then turn it by its position."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...


class PlainOps:
    """PyTorch's own operators."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return functional.rms_norm(total, (total.shape[-1],), weight, eps), total

    def rotate(
        self, heads: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float
    ) -> Tensor:
        if norm is not None:
            heads = functional.rms_norm(heads, (heads.shape[-1],), norm, eps)
        first, second = heads.chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up
