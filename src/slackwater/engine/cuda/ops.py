"""A layer's small arithmetic on CUDA, each one kernel."""

import torch
import triton
from torch import Tensor
from torch.nn import functional

from slackwater.engine.cuda.row_kernels import norm_kernel, rotate_kernel, silu_mul_kernel
from slackwater.nets.ops import HeadNorms, PlainOps, Rotation, side_by_side

INVARIANT_ROWS = 128
_SILU_BLOCK = 1024


class CudaOps(PlainOps):
    """Fused kernels. Batch-invariant: every product has 128 rows, so one kernel serves them all."""

    def __init__(self, *, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._batch_invariant or x.shape[0] == INVARIANT_ROWS:
            return functional.linear(x, weight, bias)
        rows = x.shape[0]
        whole = -(-rows // INVARIANT_ROWS) * INVARIANT_ROWS
        padded = functional.pad(x, (0, 0, 0, whole - rows))
        tiles = [
            functional.linear(tile, weight, bias) for tile in torch.split(padded, INVARIANT_ROWS)
        ]
        return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:rows]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        block = triton.next_power_of_2(x.shape[1])
        norm_kernel[(x.shape[0],)](
            x, x, weight, out, x.shape[1], eps, ADD=False, BLOCK=block, num_warps=8
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        block = triton.next_power_of_2(x.shape[1])
        norm_kernel[(x.shape[0],)](
            x, residual, weight, out, x.shape[1], eps, ADD=True, BLOCK=block, num_warps=8
        )
        return out, residual

    def rotate(
        self, parts: tuple[Tensor, ...], rotation: Rotation, norms: HeadNorms
    ) -> tuple[Tensor, Tensor, Tensor]:
        fused = side_by_side(parts)
        assert fused is not None, "the engine runs fused models"
        rows, size = fused.shape[0], norms.head_dim
        q, k, v = (fused.new_empty(rows, part.shape[1] // size, size) for part in parts)
        heads, kv_heads = q.shape[1], k.shape[1]
        rotate_kernel[(rows, heads + 2 * kv_heads)](
            fused,
            rotation.cos,
            rotation.sin,
            fused if norms.q is None else norms.q,
            fused if norms.k is None else norms.k,
            q,
            k,
            v,
            norms.eps,
            HEADS=heads,
            KV=kv_heads,
            D=size,
            HALF=triton.next_power_of_2(size // 2),
            NORM=norms.q is not None,
            num_warps=1,
        )
        return q, k, v

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        fused = side_by_side((gate, up))
        assert fused is not None, "the engine runs fused models"
        rows, columns = gate.shape
        out = fused.new_empty(rows, columns)
        silu_mul_kernel[(rows, triton.cdiv(columns, _SILU_BLOCK))](
            fused, out, columns, BLOCK=_SILU_BLOCK, num_warps=4
        )
        return out
