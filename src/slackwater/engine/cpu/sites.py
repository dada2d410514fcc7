"""The products of a pass, and what adapters add to them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from slackwater.engine.cpu.panel_writing import PanelWriter
from slackwater.engine.cpu.weights import Floats, Weight
from slackwater.nets.lora import LoraAdapter

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
    """An adapter as products read it: at a site all of its A side by side, and its B, scaled, in a
    block diagonal.
    """

    def __init__(
        self, adapter: LoraAdapter, sites: Iterable[ProductSite], new_weight: NewWeight
    ) -> None:
        self._factors: dict[tuple[str, ...], tuple[Weight, Weight, int]] = {}
        rank, scale = adapter.spec.rank, adapter.spec.scale
        writing = PanelWriter()
        for site in sites:
            pairs = [adapter.pair(name) for name in site.names]
            held = [number for number, pair in enumerate(pairs) if pair is not None]
            for place, number in enumerate(held):
                pair = pairs[number]
                assert pair is not None
                first, second = (factor.detach() for factor in pair)
                if place == 0:
                    inner = rank * len(held)
                    down, up = new_weight(inner, first.shape[1]), new_weight(site.width, inner)
                    self._factors[site.names] = (down, up, inner)
                down.write(place * rank, first, writing)
                block = torch.zeros(len(second), inner)
                block[:, place * rank : (place + 1) * rank] = second * scale
                up.write(site.starts[number], block, writing)
        writing.run()

    def add(self, site: ProductSite, x: Floats, out: Floats) -> None:
        """Add the low-rank update of `x` to `out`."""
        factors = self._factors.get(site.names)
        if factors is not None:
            down, up, inner = factors
            low = np.empty((len(x), inner), np.float32)
            down.product(x, low)
            up.product(low, out, adds=True)


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """Rows `start` to `stop` of a batch go through this adapter."""

    start: int
    stop: int
    adapter: SiteAdapters


def apply(site: ProductSite, x: Floats, out: Floats, spans: tuple[AdapterSpan, ...]) -> None:
    """The site's outputs for the rows `x`."""
    site.weight.product(x, out)
    if site.bias is not None:
        out += site.bias
    for span in spans:
        span.adapter.add(site, x[span.start : span.stop], out[span.start : span.stop])
