"""A layer's operators except attention: plain PyTorch, differentiable, on any device.

Training replaces them by fused operators that compute the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Rotation:
    """Each row's cosines and sines, `[N, d / 2]`."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The size of a head, and the weights of its norms if the family has them (Qwen3)."""

    head_dim: int
    q: Tensor | None
    k: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """A linear layer, with the two factors of its low-rank update if it has one."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None = None
    b: Tensor | None = None


class NetOps:
    """PyTorch's own operators. Rows are tokens: `[N, ...]` in, `[N, ...]` out."""

    def linears(
        self, x: Tensor, layers: Sequence[AdaptedWeight], scale: float
    ) -> tuple[Tensor, ...]:
        """Several layers of one input, each with `scale` times its update."""
        outputs = []
        for layer in layers:
            out = functional.linear(x, layer.weight, layer.bias)
            if layer.a is not None and layer.b is not None:
                update = functional.linear(functional.linear(x, layer.a), layer.b)
                out.add_(update, alpha=scale)
            outputs.append(out)
        return tuple(outputs)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`(norm(x + residual), x + residual)`."""
        total = x + residual
        return functional.rms_norm(total, (total.shape[-1],), weight, eps), total

    def rotate(
        self, parts: tuple[Tensor, ...], rotation: Rotation, norms: HeadNorms
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Flat `q, k, v` to heads `[N, heads, d]`; q and k normed if configured, and rotated."""
        q, k, v = (part.view(part.shape[0], -1, norms.head_dim) for part in parts)
        if norms.q is not None and norms.k is not None:
            q = functional.rms_norm(q, (norms.head_dim,), norms.q, norms.eps)
            k = functional.rms_norm(k, (norms.head_dim,), norms.k, norms.eps)
        return _rotate(q, rotation), _rotate(k, rotation), v

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up


def _rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    cos, sin = rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
