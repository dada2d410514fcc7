"""Layouts of a weight matrix on the CPU: in panels for our kernel, or by column for PyTorch."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.cpu.panel_kernel import PANEL, panel_product
from slackwater.engine.cpu.panel_writer import LINE, PanelWriter
from slackwater.nets.lora import LoraAdapter

Floats = NDArray[np.float32]
_SHARED_FLOATS = 1 << 18  # smaller weights are not worth a second thread


class Weight(Protocol):
    """`[width, depth]`, written by rows."""

    def write(self, first: int, values: Tensor, writer: PanelWriter) -> None:
        """Set rows from `first` on, at the latest when `writer` is run."""

    def product(self, x: Floats, out: Floats, *, adds: bool = False) -> None:
        """`out = x @ weight.T`, or `out += x @ weight.T`."""


class PanelWeight:
    """In panels of 32 columns; a row's bits are the same in every batch, on any threads."""

    def __init__(self, width: int, depth: int) -> None:
        self._panels = _zeros((-(-width // PANEL), depth, PANEL))
        self._to_write = torch.from_numpy(self._panels)

    def write(self, first: int, values: Tensor, writer: PanelWriter) -> None:
        writer.add_panels(values, self._to_write, first)

    def product(self, x: Floats, out: Floats, *, adds: bool = False) -> None:
        count = len(self._panels)
        threads = torch.get_num_threads()
        if threads == 1 or self._panels.size < _SHARED_FLOATS:
            panel_product(x, self._panels, 0, count, out, int(adds))
            return
        edges = [count * number // threads for number in range(threads + 1)]
        others = [
            _helpers(threads - 1).submit(panel_product, x, self._panels, *part, out, int(adds))
            for part in pairwise(edges[1:])
        ]
        panel_product(x, self._panels, 0, edges[1], out, int(adds))
        for other in others:
            other.result()


def _zeros(shape: tuple[int, ...]) -> Floats:
    """Zeros aligned to a cache line, so that no vector spans two lines."""
    room = np.zeros(prod(shape) + LINE // 4, np.float32)
    start = -room.ctypes.data % LINE // 4
    return room[start : start + prod(shape)].reshape(shape)


class LibraryWeight:
    """By column, through PyTorch's own product: its bits depend on the number of rows."""

    def __init__(self, width: int, depth: int) -> None:
        self._columns = torch.zeros(depth, width)

    def write(self, first: int, values: Tensor, writer: PanelWriter) -> None:
        writer.run()  # `values` may be the target of a queued write
        self._columns[:, first : first + len(values)] = values.T

    def product(self, x: Floats, out: Floats, *, adds: bool = False) -> None:
        torch.from_numpy(out).addmm_(torch.from_numpy(x), self._columns, beta=int(adds))


@lru_cache
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="product")


NewWeight = Callable[[int, int], Weight]


@dataclass(frozen=True, slots=True)
class ProductSite:
    """One product: the linear layers `names` side by side, layer i from column `starts[i]` on."""

    names: tuple[str, ...]
    starts: tuple[int, ...]
    width: int
    weight: Weight
    bias: Floats | None


class SiteAdapters:
    """An adapter by product site: A factors side by side, scaled B factors block-diagonal."""

    def __init__(
        self, adapter: LoraAdapter, sites: Iterable[ProductSite], new_weight: NewWeight
    ) -> None:
        self._factors: dict[tuple[str, ...], tuple[Weight, Weight, int]] = {}
        rank, scale = adapter.spec.rank, adapter.spec.scale
        writer = PanelWriter()
        for site in sites:
            pairs = [adapter.pair(name) for name in site.names]
            adapted = [(i, pair) for i, pair in enumerate(pairs) if pair is not None]
            if not adapted:
                continue
            inner, depth = rank * len(adapted), adapted[0][1][0].shape[1]
            down, up = new_weight(inner, depth), new_weight(site.width, inner)
            self._factors[site.names] = (down, up, inner)
            for place, (number, pair) in enumerate(adapted):
                first, second = (factor.detach() for factor in pair)
                down.write(place * rank, first, writer)
                block = torch.zeros(len(second), inner)
                block[:, place * rank : (place + 1) * rank] = second * scale
                up.write(site.starts[number], block, writer)
        writer.run()

    def add(self, site: ProductSite, x: Floats, out: Floats) -> None:
        """Add the low-rank update of `x` to `out`."""
        factors = self._factors.get(site.names)
        if factors is not None:
            down, up, inner = factors
            low = np.empty((len(x), inner), np.float32)
            down.product(x, low)
            up.product(low, out, adds=True)


AdapterSpans: TypeAlias = Sequence[tuple[int, int, SiteAdapters]]  # rows from, to, their adapter


def apply(site: ProductSite, x: Floats, out: Floats, spans: AdapterSpans) -> None:
    """The site's outputs for the rows `x`."""
    site.weight.product(x, out)
    if site.bias is not None:
        out += site.bias
    for start, stop, adapter in spans:
        adapter.add(site, x[start:stop], out[start:stop])
