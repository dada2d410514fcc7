"""A layer's small arithmetic for training on CUDA: one kernel forward and one backward each.

Linear layers with the same input are one node of the backward pass, each with its low-rank update:
the products add up the input's gradients, and a weight's gradient is added to its buffer in place.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from slackwater.nets.ops import AdaptedWeight
from slackwater.training.cuda.kernels import (
    gate_backward,
    gate_forward,
    norm_backward,
    norm_forward,
    rotate_backward,
    rotate_forward,
)
from slackwater.training.kernel_ops import KernelOps

_PARTIAL_SUMS = 1024  # programs that share the rows where a weight's gradient is summed
_FLAT_BLOCK = 2048


class _Linears(torch.autograd.Function):
    """Inputs: x, then `weight, bias, A, B` of each layer, None where there is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, *parts: Tensor | None) -> tuple[Tensor, ...]:
        outputs, states = [], []
        for weight, bias, a, b in _group_by_layer(parts):
            assert weight is not None
            out = functional.linear(x, weight, bias)
            state = None
            if a is not None and b is not None:
                state = functional.linear(x, a)
                out.addmm_(state, b.t(), alpha=scale)
            outputs.append(out)
            states.append(state)
        ctx.save_for_backward(x, *parts, *states)
        ctx.scale, ctx.weights = scale, parts[::4]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        count = len(gradients)
        parts, states = saved[: 4 * count], saved[4 * count :]
        dx: Tensor | None = None
        found: list[Tensor | None] = []
        layers = zip(_group_by_layer(parts), states, gradients, strict=True)
        for number, ((weight, bias, a, b), state, gradient) in enumerate(layers):
            assert weight is not None
            g = gradient.contiguous()
            needed = ctx.needs_input_grad[2 + 4 * number :][:4]
            if ctx.needs_input_grad[0]:
                dx = g @ weight if dx is None else dx.addmm_(g, weight)
            da = db = None
            if a is not None and b is not None:
                back = (g @ b).mul_(ctx.scale)
                if ctx.needs_input_grad[0]:
                    assert dx is not None
                    dx.addmm_(back, a)
                da = back.t() @ x if needed[2] else None
                db = (g.t() @ state).mul_(ctx.scale) if needed[3] else None
            found += [
                _add_weight_gradient(ctx.weights[number], g, x) if needed[0] else None,
                g.sum(0) if bias is not None and needed[1] else None,
                da,
                db,
            ]
        return dx, None, *found


def _group_by_layer(parts: Sequence[Tensor | None]) -> list[tuple[Tensor | None, ...]]:
    return [tuple(parts[start : start + 4]) for start in range(0, len(parts), 4)]


def _add_weight_gradient(weight: Tensor, g: Tensor, x: Tensor) -> Tensor | None:
    """Add to the weight's existing gradient in place; without one, return it to autograd."""
    if weight.grad is None or not weight.is_leaf:
        return g.t() @ x
    with torch.no_grad():
        weight.grad.addmm_(g.t(), x)
    return None


class _AddNorm(torch.autograd.Function):
    """`(norm(x + residual), x + residual)`; without a residual the sum is x itself."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        total = x if residual is None else torch.empty_like(x)
        out, columns = torch.empty_like(x), x.shape[1]
        norm_forward[(len(x),)](
            x, x if residual is None else residual.contiguous(), weight, total, out, columns, eps,
            ADD=residual is not None, BLOCK=triton.next_power_of_2(columns),
            num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.adds = eps, residual is not None
        ctx.set_materialize_grads(False)
        return out, total if residual is not None else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        if g is None:
            return passed, passed if ctx.adds else None, None, None
        (rows, columns), dx = total.shape, torch.empty_like(total)
        partial, programs = _allocate_partials(weight, ctx.needs_input_grad[2], rows)
        norm_backward[(programs,)](
            g.contiguous(), g if passed is None else passed.contiguous(), total, weight, dx,
            partial, rows, columns, ctx.eps,
            PASSED=passed is not None, WEIGHT=ctx.needs_input_grad[2],
            BLOCK=triton.next_power_of_2(columns),
            num_warps=8,
        )  # fmt: skip
        return (
            dx,
            dx if ctx.adds else None,
            _sum_partials(partial, weight, ctx.needs_input_grad[2]),
            None,
        )


class _Rotate(torch.autograd.Function):
    """Flat rows to heads: normed if a weight is given, then rotated by position."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, size: int, eps: float
    ) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        rotate_forward[(len(x),)](
            x, x if weight is None else weight, cos, sin, out, eps,
            NORM=weight is not None, **_heads(x.shape[1] // size, size),
            num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(x, cos, sin, *(() if weight is None else (weight,)))
        ctx.eps, ctx.size = eps, size
        return out.view(len(x), -1, size)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, *held = ctx.saved_tensors
        weight = held[0] if held else None
        wanted = weight is not None and ctx.needs_input_grad[1]
        dx = torch.empty_like(x)
        partial, programs = _allocate_partials(x if weight is None else weight, wanted, len(x))
        rotate_backward[(programs,)](
            g.contiguous(), x, x if weight is None else weight, cos, sin, dx, partial, len(x),
            ctx.eps,
            NORM=weight is not None, WEIGHT=wanted, **_heads(x.shape[1] // ctx.size, ctx.size),
            num_warps=4,
        )  # fmt: skip
        dweight = None if weight is None else _sum_partials(partial, weight, wanted)
        return dx, dweight, None, None, None, None


class _Gate(torch.autograd.Function):
    """`silu(gate) * up`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out, count = torch.empty_like(gate), gate.numel()
        grid = (triton.cdiv(count, _FLAT_BLOCK),)
        gate_forward[grid](gate, up, out, count, BLOCK=_FLAT_BLOCK, num_warps=8)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        grid = (triton.cdiv(count, _FLAT_BLOCK),)
        gate_backward[grid](
            g.contiguous(), gate, up, dgate, dup, count, BLOCK=_FLAT_BLOCK, num_warps=8
        )
        return dgate, dup


class CudaOps(KernelOps):
    """On a GPU."""

    def __init__(self) -> None:
        super().__init__(_AddNorm.apply, _Rotate.apply, _Gate.apply)

    def linears(
        self, x: Tensor, layers: Sequence[AdaptedWeight], scale: float
    ) -> tuple[Tensor, ...]:
        parts = [part for layer in layers for part in (layer.weight, layer.bias, layer.a, layer.b)]
        apply: Any = _Linears.apply
        outputs: tuple[Tensor, ...] = apply(x, scale, *parts)
        return outputs


def _heads(heads: int, size: int) -> dict[str, int]:
    half = size // 2
    lines, block = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    return {"HEADS": heads, "HALF": half, "LINES": lines, "BLOCK": block}


def _allocate_partials(weight: Tensor, wanted: bool, rows: int) -> tuple[Tensor, int]:
    """Memory for the partial sums of a weight's gradient, and the number of programs."""
    if not wanted:
        return weight, rows
    programs = min(rows, _PARTIAL_SUMS)
    shape = (programs, weight.shape[-1])
    return torch.empty(shape, dtype=torch.float32, device=weight.device), programs


def _sum_partials(partial: Tensor, weight: Tensor, wanted: bool) -> Tensor | None:
    return partial.sum(0).to(weight.dtype) if wanted else None
