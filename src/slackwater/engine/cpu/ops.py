"""A layer's small arithmetic on the CPU, each in one compiled pass over the rows."""

from typing import Any

import numpy as np

from slackwater.engine.cpu.compiled import compile_loop, exp_nonpositive, lane_sum

_ONE = np.float32(1.0)


@compile_loop
def _norm(values: Any, weight: Any, eps: Any, out: Any, squares: Any) -> None:
    size = values.shape[0]
    for j in range(size):
        squares[j] = values[j] * values[j]
    scale = _ONE / np.sqrt(lane_sum(squares, size) / np.float32(size) + eps)
    for j in range(size):
        out[j] = values[j] * scale * weight[j]


@compile_loop
def norm_rows(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """Root-mean-square norm of each row."""
    squares = np.empty(x.shape[1], np.float32)
    for n in range(x.shape[0]):
        _norm(x[n], weight, eps, out[n], squares)


@compile_loop
def add_and_norm_rows(x: Any, residual: Any, weight: Any, eps: Any, out: Any) -> None:
    """`residual += x`, in place, and its norm."""
    squares = np.empty(x.shape[1], np.float32)
    for n in range(x.shape[0]):
        row, added = residual[n], x[n]
        for j in range(row.shape[0]):
            row[j] += added[j]
        _norm(row, weight, eps, out[n], squares)


@compile_loop
def silu_mul_rows(gate_up: Any, out: Any) -> None:
    """`silu(gate) * up` of rows with both side by side."""
    size = out.shape[1]
    for n in range(out.shape[0]):
        row, target = gate_up[n], out[n]
        for j in range(size):
            gate = row[j]
            e = exp_nonpositive(-abs(gate))
            sigmoid = (_ONE if gate >= 0 else e) / (_ONE + e)
            target[j] = gate * sigmoid * row[size + j]
