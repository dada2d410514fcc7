"""How the CPU holds a weight that rows are multiplied with: in panels, or as a library likes it."""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slackwater.engine.cpu.panel_kernel import PANEL, panel_product
from slackwater.engine.cpu.panel_writing import LINE, PanelWriter

Floats = NDArray[np.float32]
_SHARED_FLOATS = 1 << 18  # smaller products than this are not worth a second thread


class Weight(Protocol):
    """`[width, depth]`, written by rows."""

    def write(self, first: int, values: Tensor, writing: PanelWriter) -> None:
        """Set rows from `first` on, at the latest when `writing` is run."""
        ...

    def product(self, x: Floats, out: Floats, *, adds: bool = False) -> None:
        """`out = x @ weight.T`, or `out += x @ weight.T`."""
        ...


class PanelWeight:
    """In panels of 32 columns; a row's results have the same bits in every batch, on any number of
    threads.
    """

    def __init__(self, width: int, depth: int) -> None:
        self._panels = _zeros((-(-width // PANEL), depth, PANEL))
        self._to_write = torch.from_numpy(self._panels)

    def write(self, first: int, values: Tensor, writing: PanelWriter) -> None:
        writing.panels(values, self._to_write, first)

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
    """Memory that begins a line of the caches, so that no vector lies in two of them."""
    room = np.zeros(prod(shape) + LINE // 4, np.float32)
    start = -room.ctypes.data % LINE // 4
    return room[start : start + prod(shape)].reshape(shape)


class LibraryWeight:
    """By column, through PyTorch's own product: its bits depend on the number of rows."""

    def __init__(self, width: int, depth: int) -> None:
        self._columns = torch.zeros(depth, width)

    def write(self, first: int, values: Tensor, writing: PanelWriter) -> None:
        writing.run()  # what is written from may be among it
        self._columns[:, first : first + len(values)] = values.T

    def product(self, x: Floats, out: Floats, *, adds: bool = False) -> None:
        torch.from_numpy(out).addmm_(torch.from_numpy(x), self._columns, beta=int(adds))


@lru_cache
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="product")
