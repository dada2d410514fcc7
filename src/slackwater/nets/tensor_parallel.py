"""Tensor parallelism: a rank's part of every layer, and the sums over ranks.

The weights of query, key, value, gate and up are split by rows, those of output and down by
columns, the embeddings by vocabulary. Parameters stay plain tensors, because our kernels accept
nothing else; `weights/plan` defines which slice of the model a rank holds.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from slackwater.model.errors import ConfigError
from slackwater.nets.config import NetConfig


class _Enter(torch.autograd.Function):
    """Identity; the gradient is the sum of every rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        total = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """The sum of every rank's part; the gradient passes through unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


_enter: Any = _Enter.apply
_sum: Any = _Sum.apply


class TensorParallel:
    """This rank's place among the ranks that split the layers of one model."""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        self.rank, self.size, self.group = rank, size, group

    def check(self, config: NetConfig) -> None:
        """Refuse a model whose heads or hidden units these ranks cannot share evenly."""
        for field, count in (
            ("num_key_value_heads", config.num_kv_heads),
            ("intermediate_size", config.ffn_size),
        ):
            if count % self.size:
                raise ConfigError.of("layout tp", self.size, f"must divide {count} {field}")

    def config_of(self, config: NetConfig) -> NetConfig:
        first, stop = self.vocabulary(config.vocab_size)
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=config.num_kv_heads // self.size,
            ffn_size=config.ffn_size // self.size,
            vocab_size=stop - first,
        )

    def vocabulary(self, size: int) -> tuple[int, int]:
        """This rank's tokens `[first, stop)`; the last rank may have fewer."""
        each = -(-size // self.size)
        return min(self.rank * each, size), min((self.rank + 1) * each, size)

    def enter(self, x: Tensor) -> Tensor:
        """The input of a product whose weight is split by rows."""
        entered: Tensor = _enter(x, self.group)
        return entered

    def sum(self, x: Tensor) -> Tensor:
        """The output of a product whose weight is split by columns."""
        total: Tensor = _sum(x, self.group)
        return total

    def all_reduce(self, x: Tensor) -> None:
        """Sum every rank's part in place; no gradient."""
        dist.all_reduce(x, group=self.group)

    def gather_columns(self, x: Tensor, width: int) -> Tensor | None:
        """Concatenate every rank's columns, `width` in all, on rank 0; None on the others."""
        if not len(x):
            return x.new_empty(0, width)
        each = -(-width // self.size)
        padded = functional.pad(x, (0, each - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(padded, parts, group=self.group, group_dst=0)
        return None if parts is None else torch.cat(parts, dim=1)[:, :width]

    def max_over_ranks(self, x: Tensor) -> Tensor:
        """The elementwise maximum over the ranks; no gradient."""
        found = x.detach().clone()
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found

    def embed(self, tokens: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
        """Rows of an embedding that is split by vocabulary."""
        first, stop = self.vocabulary(vocab_size)
        here = (tokens >= first) & (tokens < stop)
        rows = functional.embedding(torch.where(here, tokens - first, 0), weight)
        return self.sum(rows * here[:, None])
