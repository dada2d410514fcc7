"""A linear layer, or several with the same input side by side, with room for adapters behind it.

The first factors (A) of all adapters are stored right behind the rows of the weight, so that one
product gives a row's output and, in further columns, its low-rank states under every adapter up to
the requested extent. The second factors (B) are stored in a stack by unit of rank, `[units,
outputs, 16]`, for the kernels after the product.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from slackwater.engine.cuda.adapter_rows import UNIT
from slackwater.nets.lora import LoraAdapter

if TYPE_CHECKING:  # Triton is not installed on machines without a GPU
    from slackwater.engine.cuda.product_kernel import Tiling

_INVARIANT_ROWS = 128
_HALF = 2  # bytes
_INVARIANT_UNITS = 4


class CudaProductSite:
    """Takes over the memory of `layers`; their parameters become views of it.

    `adds_bias` is False if another rank adds the bias to the sum of all ranks' products.
    """

    def __init__(
        self,
        layers: Sequence[nn.Linear | nn.Embedding],
        names: Sequence[str],
        *,
        adds_bias: bool = True,
    ) -> None:
        self._adds_bias = adds_bias
        self._layers, self._names = tuple(layers), tuple(names)
        self.outs = tuple(layer.weight.shape[0] for layer in layers)
        self.out = sum(self.outs)
        biases = [layer.bias for layer in layers if isinstance(layer, nn.Linear)]
        self._bias: Tensor | None = None
        if biases and biases[0] is not None:
            self._bias = torch.cat([bias.detach() for bias in biases if bias is not None])
        first = layers[0].weight.detach()
        self._weight = first
        if len(layers) > 1:
            self._adopt(torch.cat([layer.weight.detach() for layer in layers]))
        elif self._bias is not None:
            self._adopt(first)  # a new version is written into the layer's own bias
        self.spread = first.new_empty(0, self.out, UNIT)

    def reserve(self, units: int) -> None:
        """Make room for so many units of adapters; existing ones stay."""
        weight = self._weight
        grown = weight.new_zeros(self._rows(units), weight.shape[1])
        grown[: len(weight)] = weight
        self._adopt(grown)
        spread = self.spread.new_zeros(units, self.out, UNIT)
        spread[: len(self.spread)] = self.spread
        self.spread = spread

    def put(self, adapter: LoraAdapter, first: int, units: int) -> None:
        """Write an adapter into its units; zeros beyond its rank and where it adapts nothing."""
        behind = self._weight[self.out :].view(-1, len(self.outs), UNIT, self._weight.shape[1])
        start = 0
        for part, (name, out) in enumerate(zip(self._names, self.outs, strict=True)):
            pair = adapter.pair(name)
            down = behind[first : first + units, part]
            up = self.spread[first : first + units, start : start + out]
            start += out
            if pair is None:
                down.zero_()
                up.zero_()
                continue
            missing = units * UNIT - adapter.spec.rank
            a, b = (factor.to(self._weight) for factor in pair)
            down.copy_(functional.pad(a, (0, 0, 0, missing)).view(units, UNIT, -1))
            up.copy_(functional.pad(b, (0, missing)).view(out, units, UNIT).transpose(0, 1))

    def product(self, x: Tensor, units: int) -> Tensor:
        """`[1, rows, out + units * parts * 16]`: outputs, then states of the first `units`."""
        rows = self._rows(units)
        return functional.linear(x, self._weight[:rows], self._bias_slice(0, rows))[None]

    def tiling(self, units: int) -> "Tiling | None":
        """How our own kernel divides a product of few rows; None if the library is better."""
        if self._weight.is_cuda and self._weight.itemsize > _HALF:
            return None  # its tiles would not fit into shared memory
        from slackwater.engine.cuda.product_kernel import processors, tiling

        return tiling(self._rows(units), self._weight.shape[1], processors())

    def few_rows_product(self, x: Tensor, units: int) -> Tensor:
        """The same as `product`, in parts, `[parts, ...]`, which the reader adds up."""
        from slackwater.engine.cuda.product_kernel import few_rows_product

        how = self.tiling(units)
        if how is None:
            return self.product(x, units)
        rows = self._rows(units)
        return few_rows_product(x, self._weight[:rows], self._bias_slice(0, rows), how)

    def invariant_product(self, x: Tensor, units: int) -> Tensor:
        """The same as `product`, by products of one fixed shape: a row's result depends neither on
        the other rows nor on `units`.
        """
        count = len(x)
        padded = functional.pad(x, (0, 0, 0, -count % _INVARIANT_ROWS))
        edges = [0, self.out]
        while edges[-1] < self._rows(units):
            edges.append(self._rows(_INVARIANT_UNITS * (len(edges) - 1)))
        columns = []
        for start, stop in pairwise(edges):
            weight = self._weight[start:stop]
            bias = self._bias_slice(start, stop)
            tiles = torch.split(padded, _INVARIANT_ROWS)
            columns.append(torch.cat([functional.linear(tile, weight, bias) for tile in tiles]))
        return (columns[0] if len(columns) == 1 else torch.cat(columns, 1))[None, :count]

    def _bias_slice(self, start: int, stop: int) -> Tensor | None:
        return self._bias[start:stop] if self._bias is not None and self._adds_bias else None

    def _rows(self, units: int) -> int:
        return self.out + units * len(self.outs) * UNIT

    def _adopt(self, weight: Tensor) -> None:
        """Use this memory from now on, and make the layers' parameters views of it."""
        self._weight = weight
        start = 0
        for layer, out in zip(self._layers, self.outs, strict=True):
            layer.weight = nn.Parameter(weight[start : start + out], requires_grad=False)
            start += out
        if self._bias is not None:
            bias = self._bias.new_zeros(len(weight))
            bias[: self.out] = self._bias[: self.out]
            self._bias, start = bias, 0
            for layer, out in zip(self._layers, self.outs, strict=True):
                layer.bias = nn.Parameter(bias[start : start + out], requires_grad=False)
                start += out
