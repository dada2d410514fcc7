"""A layer's small arithmetic by kernels of one pass forward and one backward, on any device."""

from collections.abc import Callable

from torch import Tensor

from slackwater.nets.ops import HeadNorms, NetOps, Rotation

AddNorm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
Turn = Callable[[Tensor, Tensor | None, Tensor, Tensor, int, float], Tensor]
Gate = Callable[[Tensor, Tensor], Tensor]


class KernelOps(NetOps):
    """The same meaning as PyTorch's operators.

    `add_norm(x, residual, weight, eps)` is `(norm(x + residual), x + residual)`; `turn(x, weight,
    cos, sin, size, eps)` takes flat rows to heads of that size, normed where a weight is given, and
    turns them by position; `gate` is `silu(gate) * up`.
    """

    def __init__(self, add_norm: AddNorm, turn: Turn, gate: Gate) -> None:
        self._add_norm, self._turn, self._gate = add_norm, turn, gate

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
        turned_q = self._turn(q, norms.q, cos, sin, size, eps)
        turned_k = self._turn(k, norms.k, cos, sin, size, eps)
        return turned_q, turned_k, v.view(len(v), -1, size)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._gate(gate, up)
