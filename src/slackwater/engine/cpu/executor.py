"""The CPU executor: float32, the cache in host pages, compiled loops."""

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.config import EngineConfig
from slackwater.engine.cpu.attention import BLOCK_TOKENS
from slackwater.engine.cpu.sampling import sample
from slackwater.engine.cpu.sites import AdapterSpan, SiteAdapters
from slackwater.engine.cpu.straight_pass import PagedRows, StraightPass
from slackwater.engine.cpu.weights import LibraryWeight, PanelWeight
from slackwater.engine.executor import RowBatch, SamplingColumns, Spans
from slackwater.engine.pages import HostPagePool, PageArena, PagePool, host_view
from slackwater.model.errors import ConfigError
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.lora import LoraAdapter


class CpuExecutor:
    """Rows through a model on one core (or as many threads as PyTorch was given)."""

    begins_ahead = False
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
        self._block_floats = np.uint64(elements)
        self._cache = host_view(self.arena)[: blocks * elements].reshape(blocks, elements)
        self._new_weight = LibraryWeight if config.batch_invariant is False else PanelWeight
        self._passes: WeakKeyDictionary[CausalLM, StraightPass] = WeakKeyDictionary()
        self._adapters: WeakKeyDictionary[LoraAdapter, SiteAdapters] = WeakKeyDictionary()

    def prepare(self, net: CausalLM) -> None:
        if net.dtype != torch.float32:
            raise ConfigError.of("dtype", net.dtype, "must be float32 on a CPU")
        net.requires_grad_(False)
        self._passes[net] = StraightPass(net, self._new_weight)

    def write(self, net: CausalLM, tensors: Mapping[str, Tensor]) -> None:
        self._passes[net].write(tensors)

    def prepare_adapter(self, net: CausalLM, adapter: LoraAdapter) -> None:
        sites = self._passes[net].sites()
        self._adapters[adapter] = SiteAdapters(adapter, sites, self._new_weight)

    def drop_adapter(self, adapter: LoraAdapter) -> None:
        del self._adapters[adapter]

    def logits(self, net: CausalLM, batch: RowBatch, tables: NDArray[np.int32]) -> Tensor:
        run = self._passes[net]
        rows = PagedRows(
            self._cache.reshape(-1), self._block_floats, tables, batch.slots, batch.positions
        )
        hidden = run.hidden(batch.tokens, rows, self._spans(batch.spans))
        if len(batch.wanted) != len(hidden):
            hidden = hidden[batch.wanted]
        scores = run.logits(hidden, self._spans(batch.wanted_spans()))
        return net.gather_logits(torch.from_numpy(scores))

    def decode(
        self,
        net: CausalLM,
        batch: RowBatch,
        tables: NDArray[np.int32],
        columns: SamplingColumns,
        ahead: NDArray[np.float32] | None = None,
    ) -> tuple[Tensor, NDArray[np.int64], NDArray[np.float32]]:
        del ahead  # the processor that would begin it is the one that runs this
        logits = self.logits(net, batch, tables)
        return logits, *self.sample(logits, columns)

    def sample(
        self, logits: Tensor, columns: SamplingColumns
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return sample(logits.numpy(), columns)

    def close(self) -> None:
        self._cache = np.empty((0, 0), np.float32)
        self._passes.clear()
        self.arena.close()

    def _spans(self, spans: Spans) -> tuple[AdapterSpan, ...]:
        return tuple(
            [AdapterSpan(start, stop, self._adapters[held]) for start, stop, held in spans]
        )
