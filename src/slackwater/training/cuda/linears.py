"""Linear layers of one input, each with a low-rank update where it has one, as one node of the
backward pass.

Their gradients of the input meet inside the products instead of in passes of their own over memory,
and the gradient of a weight is added where it is gathered.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slackwater.nets.ops import AdaptedWeight


class _Linears(torch.autograd.Function):
    """Inputs: x, then `weight, bias, A, B` of each layer, None where there is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, *parts: Tensor | None) -> tuple[Tensor, ...]:
        outputs, states = [], []
        for weight, bias, a, b in _by_layer(parts):
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
        layers = zip(_by_layer(parts), states, gradients, strict=True)
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
                _gathered(ctx.weights[number], g, x) if needed[0] else None,
                g.sum(0) if bias is not None and needed[1] else None,
                da,
                db,
            ]
        return dx, None, *found


def joint_linears(x: Tensor, layers: Sequence[AdaptedWeight], scale: float) -> tuple[Tensor, ...]:
    """Every layer's output for x."""
    parts = [part for layer in layers for part in (layer.weight, layer.bias, layer.a, layer.b)]
    apply: Any = _Linears.apply
    outputs: tuple[Tensor, ...] = apply(x, scale, *parts)
    return outputs


def _by_layer(parts: Sequence[Tensor | None]) -> list[tuple[Tensor | None, ...]]:
    return [tuple(parts[start : start + 4]) for start in range(0, len(parts), 4)]


def _gathered(weight: Tensor, g: Tensor, x: Tensor) -> Tensor | None:
    """Add to the gradient that a weight has already; where it has none, give it to the caller."""
    if weight.grad is None or not weight.is_leaf:
        return g.t() @ x
    with torch.no_grad():
        weight.grad.addmm_(g.t(), x)
    return None
