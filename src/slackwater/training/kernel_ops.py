"""A layer's small arithmetic by kernels of one pass forward and one backward, on any device."""

from collections.abc import Callable

from torch import Tensor

from slackwater.nets.ops import HeadNorms, NetOps, Rotation

AddNorm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
Rotate = Callable[[Tensor, Tensor | None, Tensor, Tensor, int, float], Tensor]
Gate = Callable[[Tensor, Tensor], Tensor]


class KernelOps(NetOps):
    """Computes the same as PyTorch's operators.

    `add_norm(x, residual, weight, eps)` is `(norm(x + residual), x + residual)`; `rotate(x, weight,
    cos, sin, size, eps)` views flat rows as heads of that size, norms them if a weight is given and
    rotates them by position; `gate` is `silu(gate) * up`.
    """

    def __init__(self, add_norm: AddNorm, rotate: Rotate, gate: Gate) -> None:
        self._add_norm, self._rotate, self._gate = add_norm, rotate, gate

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._add_norm(x, None, weight, eps)[0]

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out, total = self._add_norm(x, residual, weight, eps)
        return out, total

    def rotate(
        self, parts: tuple[Tensor, ...], rotation: Rotation, norms: HeadNorms
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = parts
        cos, sin, size, eps = rotation.cos, rotation.sin, norms.head_dim, norms.eps
        rotated_q = self._rotate(q, norms.q, cos, sin, size, eps)
        rotated_k = self._rotate(k, norms.k, cos, sin, size, eps)
        return rotated_q, rotated_k, v.view(len(v), -1, size)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._gate(gate, up)
