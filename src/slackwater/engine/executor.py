"""The port to a device: run rows through a model over the paged cache, and sample."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.pages import PageArena
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.lora import LoraAdapter

Spans: TypeAlias = tuple[tuple[int, int, LoraAdapter], ...]  # rows from, to, and their adapter


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of one set of weights. `slots` picks each row's line of the block tables.

    `wanted` are the rows, in rising order, whose logits are needed; `spans` the adapters by row.
    `decode_only`: each row is the newest token of its own request. Position -1 is padding.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    wanted: NDArray[np.int64]
    spans: Spans
    decode_only: bool

    def wanted_spans(self) -> Spans:
        """The adapters by row of the wanted rows alone."""
        if not self.spans:
            return ()
        edges = [(start, stop) for start, stop, _ in self.spans]
        places = np.searchsorted(self.wanted, np.array(edges)).tolist()
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


class Executor(Protocol):
    """A device that holds the cache of one model shape.

    `begins_ahead`: it can begin a decode step before the host has seen the tokens of the one
    before.
    """

    begins_ahead: bool
    block_tokens: int
    block_bytes: int
    arena: PageArena

    def prepare(self, net: CausalLM) -> None:
        """Lay a model's weights out as this device reads them, in place."""

    def write(self, net: CausalLM, tensors: Mapping[str, Tensor]) -> None:
        """Give a prepared model new weights in place, perhaps while other models' rows run."""

    def prepare_adapter(self, net: CausalLM, adapter: LoraAdapter) -> None:
        """Take note of an adapter over a prepared model, or of what has changed in it."""

    def drop_adapter(self, adapter: LoraAdapter) -> None:
        """Forget an adapter that no row will ask for again."""

    def logits(self, net: CausalLM, batch: RowBatch, tables: NDArray[np.int32]) -> Tensor:
        """Put the rows' keys and values into the cache; `[len(batch.wanted), vocab]` float32, until
        the next call.
        """

    def decode(
        self,
        net: CausalLM,
        batch: RowBatch,
        tables: NDArray[np.int32],
        columns: SamplingColumns,
        ahead: NDArray[np.float32] | None = None,
    ) -> tuple[Tensor, NDArray[np.int64], NDArray[np.float32]]:
        """A step in which every row is wanted and sampled: `logits`, and from them a token and its
        log-prob for each.

        `ahead` are the rows' uniform numbers of the step after this one. Where they are given, that
        step may be begun: every row has a block for it, and nobody reads these logits.
        """

    def sample(
        self, logits: Tensor, columns: SamplingColumns
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """A token and its log-prob for each row."""

    def close(self) -> None:
        """Give the cache's memory back; nothing is run here again."""


class StepwiseDecode:
    """Of executors that begin no step before the tokens of the one before are seen."""

    begins_ahead = False

    def decode(
        self: Executor,
        net: CausalLM,
        batch: RowBatch,
        tables: NDArray[np.int32],
        columns: SamplingColumns,
        ahead: NDArray[np.float32] | None = None,
    ) -> tuple[Tensor, NDArray[np.int64], NDArray[np.float32]]:
        del ahead
        logits = self.logits(net, batch, tables)
        return logits, *self.sample(logits, columns)
