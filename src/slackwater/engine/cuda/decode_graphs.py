"""Decode steps as captured CUDA graphs: one launch instead of some four hundred."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.cuda.attention import CudaPagedAttention, PagedRows
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.ops import NetOps

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
_WARM_UPS = 2


def graph_rows(rows: int) -> int:
    """The captured size that `rows` are padded to."""
    return next((size for size in _SIZES if size >= rows), -(-rows // 32) * 32)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class DecodeGraphs:
    """Graphs by model, rows and cuts of the context, captured when first wanted.

    All read one input buffer: per row its token, its position and its line of the block table.
    Rows beyond the batch are token 0 at position 0 of the scratch block.
    """

    def __init__(
        self, cache: Tensor, block_elements: int, ops: NetOps, rows: int, table_width: int
    ) -> None:
        self._cache, self._block_elements, self._ops = cache, block_elements, ops
        rows = graph_rows(rows)
        self._host = torch.zeros(rows, 2 + table_width, dtype=torch.int32, pin_memory=True)
        self._host_view = self._host.numpy()
        self._inputs = torch.zeros_like(self._host, device=cache.device)
        self._slots = torch.arange(rows, dtype=torch.int32, device=cache.device)
        self._captured: dict[tuple[int, int, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def logits(
        self,
        net: CausalLM,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        tables: NDArray[np.int32],
        spans: int,
    ) -> Tensor:
        """Run the rows; `[len(tokens), vocab]`, valid until the next call."""
        count = len(tokens)
        rows = graph_rows(count)
        host = self._host_view
        host[:count, 0], host[:count, 1] = tokens, positions
        host[:count, 2 : 2 + tables.shape[1]] = tables
        host[count:rows] = 0
        self._inputs[:rows].copy_(self._host[:rows], non_blocking=True)
        key = (id(net), rows, spans)
        if key not in self._captured:
            self._captured[key] = self._capture(net, rows, spans)
        captured = self._captured[key]
        captured.graph.replay()
        return captured.logits[:count]

    def _forward(self, net: CausalLM, rows: int, spans: int) -> Tensor:
        inputs = self._inputs[:rows]
        tokens, positions = inputs[:, 0].long(), inputs[:, 1].contiguous()
        where = PagedRows(inputs[:, 2:], self._slots[:rows], positions, spans, None)
        attention = CudaPagedAttention(self._cache, self._block_elements, where)
        hidden = net.hidden(tokens, positions.long(), attention, ops=self._ops)
        return net.logits(hidden, ops=self._ops)

    def _capture(self, net: CausalLM, rows: int, spans: int) -> _Captured:
        new_stream: Any = torch.cuda.Stream
        side = new_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._forward(net, rows, spans)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._forward(net, rows, spans)
        return _Captured(graph, logits)
