"""The CPU executor: float32, the cache in host pages, compiled loops."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.config import EngineConfig
from slackwater.engine.cpu.attention import BLOCK_TOKENS, CpuPagedAttention
from slackwater.engine.cpu.linear import FEW_ROWS, LADDER
from slackwater.engine.cpu.ops import CpuOps
from slackwater.engine.cpu.sampling import sample
from slackwater.engine.executor import RowBatch, SamplingColumns
from slackwater.engine.pages import HostPagePool, PageArena, PagePool, host_view
from slackwater.model.errors import ConfigError
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig


class CpuExecutor:
    """Rows through a model on one core (or as many threads as PyTorch was given)."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, net: NetConfig, config: EngineConfig, pool: PagePool | None = None) -> None:
        self.block_bytes = net.kv_values_per_token * BLOCK_TOKENS * 4
        self._pool = pool or HostPagePool(config.kv_bytes, config.page_bytes)
        room = self._pool.capacity * self._pool.page_bytes
        if room < 2 * self.block_bytes:
            raise ConfigError.of(
                "kv_bytes", config.kv_bytes, f"must hold 2 blocks of {self.block_bytes} bytes"
            )
        self.arena = PageArena(self._pool, room)
        blocks = self.arena.size_bytes // self.block_bytes
        elements = self.block_bytes // 4
        self._cache = host_view(self.arena)[: blocks * elements].reshape(blocks, elements)
        self._ops = CpuOps(batch_invariant=config.batch_invariant is not False)

    def prepare(self, net: CausalLM) -> None:
        if net.dtype != torch.float32:
            raise ConfigError.of("dtype", net.dtype, "must be float32 on a CPU")
        net.requires_grad_(False)
        net.fuse(by_column=True)

    @torch.inference_mode()
    def logits(self, net: CausalLM, batch: RowBatch, tables: NDArray[np.int32]) -> Tensor:
        tokens, positions, slots = _padded(batch)
        attention = CpuPagedAttention(self._cache, tables, slots, positions)
        places = torch.from_numpy(np.maximum(positions, 0))
        hidden = net.hidden(
            torch.from_numpy(tokens), places, attention, adapters=batch.adapters(), ops=self._ops
        )
        if not len(batch.wanted):
            return hidden.new_empty(0, net.config.vocab_size)
        if len(batch.wanted) != len(hidden):
            hidden = hidden[torch.from_numpy(batch.wanted)]
        return net.logits(hidden, adapters=batch.wanted_adapters(), ops=self._ops)

    def sample(
        self, logits: Tensor, columns: SamplingColumns
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return sample(logits.numpy(), columns)


def _padded(
    batch: RowBatch,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The rows, filled up to the next size that products like, with rows that do nothing."""
    rows = len(batch.tokens)
    size = next((size for size in LADDER if size >= rows), rows)
    if rows <= FEW_ROWS or size == rows:
        return batch.tokens, batch.positions, batch.slots
    extra = np.zeros(size - rows, np.int64)
    return (
        np.concatenate((batch.tokens, extra)),
        np.concatenate((batch.positions, extra - 1)),
        np.concatenate((batch.slots, extra)),
    )
