"""The device interface: run rows through a model over the paged cache, and sample."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.config import EngineConfig
from slackwater.engine.pages import PageArena, PagePool
from slackwater.model.errors import ConfigError
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.lora import LoraAdapter

Spans: TypeAlias = tuple[tuple[int, int, LoraAdapter], ...]  # rows from, to, and their adapter
Sampled: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]  # by row: token, log-prob


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of one set of weights. `slots` picks each row's line of the block tables.

    `logit_rows` are the rows, in rising order, whose logits are needed; `spans` are the adapters by
    row. `decode_only`: each row is the newest token of its own request. Position -1 is padding.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    spans: Spans
    decode_only: bool

    def logit_row_spans(self) -> Spans:
        """The adapter spans, counted within `logit_rows` only."""
        if not self.spans:
            return ()
        edges = [(start, stop) for start, stop, _ in self.spans]
        places = np.searchsorted(self.logit_rows, np.array(edges)).tolist()
        return tuple(
            (first, last, adapter)
            for (first, last), (_, _, adapter) in zip(places, self.spans, strict=True)
            if first < last
        )


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """How each row is sampled; `uniform` is its number from its request's random stream."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    uniform: NDArray[np.float32]

    def take(self, rows: NDArray[np.int64]) -> "SamplingColumns":
        return SamplingColumns(
            self.temperature[rows], self.top_p[rows], self.top_k[rows], self.uniform[rows]
        )


def cache_arena(pool: PagePool, block_bytes: int, config: EngineConfig) -> PageArena:
    """The memory of a cache, over the whole pool."""
    room = pool.capacity * pool.page_bytes
    if room < 2 * block_bytes:
        fix = f"must hold 2 blocks of {block_bytes} bytes"
        raise ConfigError.of("kv_bytes", config.kv_bytes, fix)
    return PageArena(pool, room)


class Executor(Protocol):
    """A device that holds the cache of one model shape.

    `begins_ahead`: it can start a decode step before the host has read the previous step's tokens,
    and then has a `decode` of its own.
    """

    begins_ahead: bool = False
    block_tokens: int
    block_bytes: int
    arena: PageArena

    def prepare(self, net: CausalLM) -> None:
        """Convert a model's weights, in place, to the layout that this device reads."""

    def write(self, net: CausalLM, tensors: Mapping[str, Tensor]) -> None:
        """Write new weights into a prepared model, possibly while rows of other models run."""

    def prepare_adapter(self, net: CausalLM, adapter: LoraAdapter) -> None:
        """Register an adapter of a prepared model, or its changed factors."""

    def drop_adapter(self, adapter: LoraAdapter) -> None:
        """Forget an adapter that no row uses any more."""

    def logits(self, net: CausalLM, batch: RowBatch, tables: NDArray[np.int32]) -> Tensor:
        """Store the rows' keys and values in the cache and return `[len(batch.logit_rows), vocab]`
        float32, valid until the next call.
        """

    def decode(
        self,
        net: CausalLM,
        batch: RowBatch,
        tables: NDArray[np.int32],
        columns: SamplingColumns,
        ahead: NDArray[np.float32] | None = None,
    ) -> tuple[Tensor, *Sampled]:
        """A step that samples every row: the logits, and a token with its log-prob for each row.

        `ahead` are the rows' uniform numbers for the next step. If they are given, the executor may
        start that step at once: every row has a block for it, and the caller ignores these logits.
        """
        logits = self.logits(net, batch, tables)
        return logits, *self.sample(logits, columns)

    def sample(self, logits: Tensor, columns: SamplingColumns) -> Sampled:
        """A token and its log-prob for each row."""

    def close(self) -> None:
        """Free the cache's memory; the executor is not used again."""
