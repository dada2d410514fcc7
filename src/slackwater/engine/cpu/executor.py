"""The CPU executor: float32, the cache in host pages, compiled loops."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.config import EngineConfig
from slackwater.engine.cpu.attention import BLOCK_TOKENS
from slackwater.engine.cpu.compiled import compile_loop, exp_nonpositive, lane_max, lane_sum
from slackwater.engine.cpu.forward_pass import CpuForwardPass, PagedRows
from slackwater.engine.cpu.weights import AdapterSpans, LibraryWeight, PanelWeight, SiteAdapters
from slackwater.engine.executor import (
    Executor,
    RowBatch,
    Sampled,
    SamplingColumns,
    Spans,
    cache_arena,
)
from slackwater.engine.pages import HostPagePool, PagePool, host_view
from slackwater.model.errors import ConfigError
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.lora import LoraAdapter

_CHUNK = 64
_FIRST_CANDIDATES = 512


@compile_loop
def pick(weights: Any, count: int, aim: Any) -> int:
    """The first index at which the running sum of `weights[:count]` exceeds `aim`."""
    reached, last = np.float32(0), count - 1
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        part = lane_sum(weights[start:], size)
        if reached + part > aim:
            for j in range(start, start + size):
                reached += weights[j]
                if reached > aim:
                    return j
            return start + size - 1
        reached += part
    while last > 0 and weights[last] == 0:
        last -= 1
    return last


@compile_loop
def weigh_row(row: Any, heat: Any, weights: Any) -> Any:
    """`weights = exp((row - max) / heat)`; the likeliest token and the sum of the weights."""
    top = lane_max(row, row.shape[0])
    best = 0
    while row[best] != top and best + 1 < row.shape[0]:
        best += 1
    for j in range(row.shape[0]):
        weights[j] = exp_nonpositive((row[j] - top) / heat)
    return best, lane_sum(weights, row.shape[0])


@compile_loop
def sample_rows(
    logits: Any, temperature: Any, uniform: Any, chosen: Any, tokens: Any, logprobs: Any
) -> None:
    """A token and its log-prob for each row, or the log-prob of `chosen` where that is not -1."""
    vocab = logits.shape[1]
    weights = np.empty(vocab, np.float32)
    for n in range(logits.shape[0]):
        row = logits[n]
        heat = temperature[n] if temperature[n] > 0 else np.float32(1)
        token, total = weigh_row(row, heat, weights)
        top = row[token]
        if chosen[n] >= 0:
            token = chosen[n]
        elif temperature[n] > 0:
            token = pick(weights, vocab, uniform[n] * total)
        tokens[n] = token
        logprobs[n] = (row[token] - top) / heat - np.log(total)


def apply_top_k_top_p(weights: NDArray[np.float32], top_p: float, top_k: int) -> NDArray[np.int64]:
    """Ids that survive top-k and then top-p, heaviest first; of equal weights the lower id."""
    most = min(top_k, len(weights)) if top_k > 0 else len(weights)
    total = float(weights.sum(dtype=np.float64)) if top_k == 0 else 0.0
    candidates = most if top_k > 0 else min(_FIRST_CANDIDATES, len(weights))
    while True:
        edge = np.partition(weights, len(weights) - candidates)[len(weights) - candidates]
        ids = np.nonzero(weights >= edge)[0]
        ids = ids[np.argsort(-weights[ids], kind="stable")][:most]
        mass = np.cumsum(weights[ids], dtype=np.float64)
        enough = int(np.searchsorted(mass, top_p * (total or mass[-1]))) + 1
        if enough <= len(ids) or len(ids) >= most:
            return ids[:enough]
        candidates = len(weights)


def _draw_truncated_rows(
    logits: NDArray[np.float32], columns: SamplingColumns
) -> NDArray[np.int64]:
    """The tokens of rows with top-k or top-p; -1 for the others."""
    chosen = np.full(len(logits), -1, np.int64)
    cut = (columns.temperature > 0) & ((columns.top_k > 0) | (columns.top_p < 1))
    vocab = logits.shape[1]
    weights = np.empty(vocab, np.float32)
    for n in np.nonzero(cut)[0].tolist():
        weigh_row(logits[n], columns.temperature[n], weights)
        ids = apply_top_k_top_p(weights, float(columns.top_p[n]), int(columns.top_k[n]))
        left = weights[ids]
        aim = columns.uniform[n] * lane_sum(left, len(left))
        chosen[n] = ids[pick(left, len(left), aim)]
    return chosen


def sample(logits: NDArray[np.float32], columns: SamplingColumns) -> Sampled:
    """Tokens and log-probs, row by row; a log-prob is from before top-k and top-p."""
    tokens = np.empty(logits.shape[0], np.int64)
    logprobs = np.empty(logits.shape[0], np.float32)
    chosen = _draw_truncated_rows(logits, columns)
    sample_rows(logits, columns.temperature, columns.uniform, chosen, tokens, logprobs)
    return tokens, logprobs


class CpuExecutor(Executor):
    """Runs rows through a model on one core, or on as many threads as PyTorch may use."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, net: NetConfig, config: EngineConfig, pool: PagePool | None = None) -> None:
        self.block_bytes = net.kv_values_per_token * BLOCK_TOKENS * 4
        pool = pool or HostPagePool(config.kv_bytes, config.page_bytes)
        self.arena = cache_arena(pool, self.block_bytes, config)
        blocks = self.arena.size_bytes // self.block_bytes
        elements = self.block_bytes // 4
        self._block_floats = np.uint64(elements)
        self._cache = host_view(self.arena)[: blocks * elements].reshape(blocks, elements)
        self._new_weight = LibraryWeight if config.batch_invariant is False else PanelWeight
        self._passes: WeakKeyDictionary[CausalLM, CpuForwardPass] = WeakKeyDictionary()
        self._adapters: WeakKeyDictionary[LoraAdapter, SiteAdapters] = WeakKeyDictionary()

    def prepare(self, net: CausalLM) -> None:
        if net.dtype != torch.float32:
            raise ConfigError.of("dtype", net.dtype, "must be float32 on a CPU")
        net.requires_grad_(False)
        self._passes[net] = CpuForwardPass(net, self._new_weight)

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
        hidden = run.run_layers(batch.tokens, rows, self._spans(batch.spans))
        if len(batch.logit_rows) != len(hidden):
            hidden = hidden[batch.logit_rows]
        scores = run.logits(hidden, self._spans(batch.logit_row_spans()))
        return net.gather_logits(torch.from_numpy(scores))

    def sample(self, logits: Tensor, columns: SamplingColumns) -> Sampled:
        return sample(logits.numpy(), columns)

    def close(self) -> None:
        self._cache = np.empty((0, 0), np.float32)
        self._passes.clear()
        self.arena.close()

    def _spans(self, spans: Spans) -> AdapterSpans:
        return [(start, stop, self._adapters[lora]) for start, stop, lora in spans]
