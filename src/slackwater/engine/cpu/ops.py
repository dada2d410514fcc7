"""A layer's small arithmetic on the CPU, each in one compiled pass over the rows."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slackwater.engine.cpu.compiled import LANES, compiled, exp_into, lane_sum
from slackwater.engine.cpu.linear import InvariantLinear
from slackwater.nets.ops import HeadNorms, PlainOps, Rotation, side_by_side

_ONE = np.float32(1.0)


@compiled
def _norm(values: Any, weight: Any, eps: Any, out: Any, squares: Any, lanes: Any) -> None:
    size = values.shape[0]
    for j in range(size):
        squares[j] = values[j] * values[j]
    scale = _ONE / np.sqrt(lane_sum(squares, size, lanes) / np.float32(size) + eps)
    for j in range(size):
        out[j] = values[j] * scale * weight[j]


@compiled
def norm_rows(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """Root-mean-square norm of each row."""
    squares, lanes = np.empty(x.shape[1], np.float32), np.empty(LANES, np.float32)
    for n in range(x.shape[0]):
        _norm(x[n], weight, eps, out[n], squares, lanes)


@compiled
def add_and_norm_rows(x: Any, residual: Any, weight: Any, eps: Any, out: Any) -> None:
    """`residual += x`, in place, and its norm."""
    squares, lanes = np.empty(x.shape[1], np.float32), np.empty(LANES, np.float32)
    for n in range(x.shape[0]):
        row, added = residual[n], x[n]
        for j in range(row.shape[0]):
            row[j] += added[j]
        _norm(row, weight, eps, out[n], squares, lanes)


@compiled
def _turn(head: Any, cos: Any, sin: Any, out: Any) -> None:
    half = cos.shape[0]
    for j in range(half):
        out[j] = head[j] * cos[j] - head[j + half] * sin[j]
    for j in range(half):
        out[j + half] = head[j + half] * cos[j] + head[j] * sin[j]


@compiled
def rotate_rows(
    qkv: Any, cos: Any, sin: Any, q_norm: Any, k_norm: Any, eps: Any, q: Any, k: Any, v: Any
) -> None:
    """Rows of q, k and v side by side to heads; q and k normed if weights are given, and turned."""
    heads, kv_heads, size = q.shape[1], k.shape[1], q.shape[2]
    normed, squares = np.empty(size, np.float32), np.empty(size, np.float32)
    lanes = np.empty(LANES, np.float32)
    for n in range(qkv.shape[0]):
        row = qkv[n]
        for h in range(heads + kv_heads):
            head = row[h * size : (h + 1) * size]
            target = q[n, h] if h < heads else k[n, h - heads]
            weight = q_norm if h < heads else k_norm
            if weight.shape[0] > 0:
                _norm(head, weight, eps, normed, squares, lanes)
                _turn(normed, cos[n], sin[n], target)
            else:
                _turn(head, cos[n], sin[n], target)
        first = (heads + kv_heads) * size
        for h in range(kv_heads):
            target, head = v[n, h], row[first + h * size : first + (h + 1) * size]
            for j in range(size):
                target[j] = head[j]


@compiled
def silu_mul_rows(gate_up: Any, out: Any) -> None:
    """`silu(gate) * up` of rows with both side by side."""
    size = out.shape[1]
    small, powers = np.empty(size, np.float32), np.empty(size, np.int32)
    for n in range(out.shape[0]):
        row, target = gate_up[n], out[n]
        for j in range(size):
            small[j] = -abs(row[j])
        exp_into(small, size, powers)
        for j in range(size):
            gate, e = row[j], small[j]
            sigmoid = (_ONE if gate >= 0 else e) / (_ONE + e)
            target[j] = gate * sigmoid * row[size + j]


class CpuOps(PlainOps):
    """Compiled, and batch-invariant if asked: then products go by `InvariantLinear`."""

    def __init__(self, *, batch_invariant: bool) -> None:
        self._invariant = InvariantLinear() if batch_invariant else None
        self._no_norm = np.empty(0, np.float32)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._invariant is None:
            return functional.linear(x, weight, bias)
        return self._invariant(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        norm_rows(x.numpy(), weight.detach().numpy(), np.float32(eps), out.numpy())
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        add_and_norm_rows(
            x.numpy(), residual.numpy(), weight.detach().numpy(), np.float32(eps), out.numpy()
        )
        return out, residual

    def rotate(
        self, parts: tuple[Tensor, ...], rotation: Rotation, norms: HeadNorms
    ) -> tuple[Tensor, Tensor, Tensor]:
        fused = side_by_side(parts)
        assert fused is not None, "the engine runs fused models"
        rows, size = fused.shape[0], norms.head_dim
        q, k, v = (torch.empty(rows, part.shape[1] // size, size) for part in parts)
        rotate_rows(
            fused.numpy(),
            rotation.cos.numpy(),
            rotation.sin.numpy(),
            self._no_norm if norms.q is None else norms.q.detach().numpy(),
            self._no_norm if norms.k is None else norms.k.detach().numpy(),
            np.float32(norms.eps),
            q.numpy(),
            k.numpy(),
            v.numpy(),
        )
        return q, k, v

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        fused = side_by_side((gate, up))
        assert fused is not None, "the engine runs fused models"
        out = torch.empty(gate.shape)
        silu_mul_rows(fused.numpy(), out.numpy())
        return out
