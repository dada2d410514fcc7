"""A layer's elementwise operations for training on the CPU in fp32: one compiled pass forward and
one backward each.

PyTorch's operators take several passes over memory for each, and more for their derivatives; on a
small net they cost more than the products. The compiler may reassociate sums, always in the same
way for the same shapes on one machine.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from torch import Tensor

from slackwater.training.kernel_ops import KernelOps

Function = TypeVar("Function", bound=Callable[..., Any])


def compile_loop(function: Function) -> Function:
    """Compile once per machine, cached on disk; vectorised sums."""
    decorate: Any = numba.njit(fastmath={"contract", "reassoc"}, cache=True, error_model="numpy")
    result: Function = decorate(function)
    return result


@compile_loop
def norm_forward(x: Any, weight: Any, eps: Any, out: Any, scales: Any) -> None:
    """Root-mean-square norm of each row; `scales` keeps what each row was multiplied by."""
    rows, size = x.shape
    for n in range(rows):
        total = np.float32(0)
        for j in range(size):
            total += x[n, j] * x[n, j]
        scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        scales[n] = scale
        for j in range(size):
            out[n, j] = x[n, j] * scale * weight[j]


@compile_loop
def norm_backward(g: Any, x: Any, weight: Any, scales: Any, dx: Any, dweight: Any) -> None:
    """Adds to `dx` and to `dweight`."""
    rows, size = x.shape
    for n in range(rows):
        scale = scales[n]
        dot = np.float32(0)
        for j in range(size):
            dot += g[n, j] * weight[j] * x[n, j]
        pull = dot * scale * scale / np.float32(size)
        for j in range(size):
            dx[n, j] += scale * (g[n, j] * weight[j] - x[n, j] * pull)
            dweight[j] += g[n, j] * x[n, j] * scale


@compile_loop
def rotate_rows(x: Any, cos: Any, sin: Any, heads: int, direction: Any, out: Any) -> None:
    """Rows `n * heads + h` by the rotation of row n, forward (`direction` 1) or back (-1)."""
    half = cos.shape[1]
    for n in range(cos.shape[0]):
        for h in range(heads):
            row = n * heads + h
            for j in range(half):
                c, s = cos[n, j], sin[n, j] * direction
                first, second = x[row, j], x[row, j + half]
                out[row, j] = first * c - second * s
                out[row, j + half] = second * c + first * s


@compile_loop
def gate_forward(gate: Any, sigmoid: Any, up: Any, out: Any) -> None:
    """`gate * sigmoid * up`."""
    for i in range(gate.shape[0]):
        out[i] = gate[i] * sigmoid[i] * up[i]


@compile_loop
def gate_backward(g: Any, gate: Any, sigmoid: Any, up: Any, dgate: Any, dup: Any) -> None:
    one = np.float32(1)
    for i in range(gate.shape[0]):
        s = sigmoid[i]
        dup[i] = g[i] * gate[i] * s
        dgate[i] = g[i] * up[i] * s * (one + gate[i] * (one - s))


class _AddNorm(torch.autograd.Function):
    """`(norm(x + residual), x + residual)`; without a residual the sum is x itself."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x.clone() if residual is None else x + residual
        out, scales = torch.empty_like(total), torch.empty(total.shape[0])
        norm_forward(_array(total), _weight(weight), np.float32(eps), _array(out), _array(scales))
        ctx.save_for_backward(total, weight, scales)
        ctx.adds = residual is not None
        return out, total

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_total: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, scales = ctx.saved_tensors
        dx, dweight = g_total.clone(memory_format=torch.contiguous_format), torch.zeros_like(weight)
        norm_backward(
            _array(g), _array(total), _weight(weight), _array(scales), _array(dx), _array(dweight)
        )
        return dx, dx if ctx.adds else None, dweight, None


class _Rotate(torch.autograd.Function):
    """Flat rows to heads: normed if a weight is given, then rotated by position."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, size: int, eps: float
    ) -> Tensor:
        rows = x.contiguous().view(-1, size)
        heads = x.shape[1] // size
        out = torch.empty_like(rows)
        if weight is None:
            rotate_rows(_array(rows), _array(cos), _array(sin), heads, np.float32(1), _array(out))
            ctx.save_for_backward(cos, sin)
        else:
            normed, scales = torch.empty_like(rows), torch.empty(rows.shape[0])
            norm_forward(
                _array(rows), _weight(weight), np.float32(eps), _array(normed), _array(scales)
            )
            rotate_rows(_array(normed), _array(cos), _array(sin), heads, np.float32(1), _array(out))
            ctx.save_for_backward(cos, sin, rows, weight, scales)
        ctx.heads = heads
        return out.view(-1, heads, size)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *normed = ctx.saved_tensors
        g = g.contiguous().view(-1, g.shape[2])
        back = torch.empty_like(g)
        rotate_rows(_array(g), _array(cos), _array(sin), ctx.heads, np.float32(-1), _array(back))
        flat = (cos.shape[0], -1)
        if not normed:
            return back.view(flat), None, None, None, None, None
        rows, weight, scales = normed
        dx, dweight = torch.zeros_like(rows), torch.zeros_like(weight)
        norm_backward(
            _array(back), _array(rows), _weight(weight), _array(scales), _array(dx), _array(dweight)
        )
        return dx.view(flat), dweight, None, None, None, None


class _Gate(torch.autograd.Function):
    """`silu(gate) * up`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        sigmoid, out = torch.sigmoid(gate), torch.empty_like(gate)
        gate_forward(_flat(gate), _flat(sigmoid), _flat(up), _flat(out))
        ctx.save_for_backward(gate, sigmoid, up)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        gate, sigmoid, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        gate_backward(_flat(g), _flat(gate), _flat(sigmoid), _flat(up), _flat(dgate), _flat(dup))
        return dgate, dup


class FusedOps(KernelOps):
    """fp32 on the CPU only."""

    def __init__(self) -> None:
        super().__init__(_AddNorm.apply, _Rotate.apply, _Gate.apply)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().numpy()


def _weight(weight: Tensor) -> Any:
    """A copy of a norm's weight: FSDP frees a gathered parameter by resizing its memory, which is
    impossible once NumPy has a view of it.
    """
    return weight.detach().clone().numpy()


def _flat(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().view(-1).numpy()
