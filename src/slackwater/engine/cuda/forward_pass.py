"""The CUDA forward pass: fused weights with room for adapters, and one loop over the layers.

`nets/causal_lm.py` defines the model, and the tests compare this pass with it. A layer is four
products and five kernels: rotation (which also stores keys and values), attention, norm,
activation, norm. Adapters add no kernel to a decode step. If few rows decode, the products are our
own and kernels start early (`early_start.py`). Ranks that share the layers add their parts up after
the second and the fourth product.
"""

from dataclasses import dataclass

import triton
from torch import Tensor

from slackwater.engine.cuda.adapter_rows import DECODE_TILE, PROMPT_TILE, UNIT, AdapterRows
from slackwater.engine.cuda.attention import BLOCK_TOKENS, CudaPagedAttention
from slackwater.engine.cuda.early_start import EarlyStart, early_start
from slackwater.engine.cuda.product_kernel import FEW_ROWS
from slackwater.engine.cuda.row_kernels import (
    norm_kernel,
    rotate_kernel,
    silu_mul_kernel,
    spread_kernel,
)
from slackwater.engine.cuda.sites import CudaProductSite
from slackwater.nets.causal_lm import CausalLM, Layer
from slackwater.nets.lora import LoraAdapter

_NORM_CHUNK = 4096
_SILU_BLOCK = 128
_SPREAD_BLOCK = 128
_MOST_SITES = 3  # of a layer's four products
_CACHED_UNITS = 4  # second factors of so few units stay in the device's cache from row to row
_PRELOADED_UNITS = 2  # units of an adapter whose second factors are read early: rank 32


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: CudaProductSite
    o: CudaProductSite
    gate_up: CudaProductSite
    down: CudaProductSite
    norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None

    @property
    def sites(self) -> tuple[CudaProductSite, ...]:
        return self.qkv, self.o, self.gate_up, self.down

    @classmethod
    def from_layer(cls, layer: Layer, number: int, *, leads: bool) -> "_Layer":
        """`leads`: of the ranks that share the layer, this one adds the biases."""
        attn, mlp, name = layer.self_attn, layer.mlp, f"model.layers.{number}."
        qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
        return cls(
            CudaProductSite([getattr(attn, n) for n in qkv], [f"{name}self_attn.{n}" for n in qkv]),
            CudaProductSite([attn.o_proj], [f"{name}self_attn.o_proj"], adds_bias=leads),
            CudaProductSite(
                [getattr(mlp, n) for n in gate_up], [f"{name}mlp.{n}" for n in gate_up]
            ),
            CudaProductSite([mlp.down_proj], [f"{name}mlp.down_proj"], adds_bias=leads),
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            None if attn.q_norm is None else attn.q_norm.weight,
            None if attn.k_norm is None else attn.k_norm.weight,
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """Settings that all kernels of one step share.

    `few`: products of few rows by our own kernel, and kernels that start `early`. `preloaded`: how
    many units of each adapter have their second factors read before the predecessor has ended.
    """

    adapters: AdapterRows | None
    extent: int
    few: bool
    early: EarlyStart
    preloaded: int

    @property
    def fused(self) -> AdapterRows | None:
        """The adapters, if the kernels after a product add their updates."""
        return None if self.adapters is None or not self.adapters.fused else self.adapters


class CudaForwardPass:
    """Takes over the linear layers' memory; the parameters of `net` become views of it."""

    def __init__(self, net: CausalLM, *, batch_invariant: bool) -> None:
        config, self._parallel = net.rank_config, net.parallel
        self._net, self._invariant, self._eps = net, batch_invariant, config.norm_eps
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._size = config.head_dim
        layers = enumerate(net.model.layers)
        leads = net.parallel is None or net.parallel.rank == 0
        self._layers = [_Layer.from_layer(layer, i, leads=leads) for i, layer in layers]  # type: ignore[arg-type]  # torch's list says Module
        head = net.model.embed_tokens if net.lm_head is None else net.lm_head
        self._head = CudaProductSite([head], ["lm_head"])
        self._norms = [layer.norm for layer in self._layers[1:]] + [net.model.norm.weight]
        self._cos, self._sin = net.rotary.tables()
        self.units = 0

    def reserve(self, units: int) -> None:
        """Make room for so many units of adapters. Graphs captured before become invalid."""
        self.units = units
        for site in self._sites():
            site.reserve(units)

    def put(self, adapter: LoraAdapter, first: int, units: int) -> None:
        for site in self._sites():
            site.put(adapter, first, units)

    def run_layers(
        self, tokens: Tensor, attention: CudaPagedAttention, adapters: AdapterRows | None
    ) -> Tensor:
        """`[rows, hidden]` after the last norm; the rows' keys and values go into the cache."""
        step = self._step(len(tokens), adapters)
        residual = self._embed(tokens)
        x = self._norm(residual[None], None, self._layers[0].norm, None, step)
        for number, layer in enumerate(self._layers):
            qkv = self._product(layer.qkv, x, step)
            q = self._rotate(number, layer, qkv, attention, step)
            seen = attention(number, q, step.early).view(len(q), -1)
            out = self._all_reduce_product(layer.o, seen, step)
            x = self._norm(out, residual, layer.mlp_norm, layer.o, step)
            gate_up = self._product(layer.gate_up, x, step)
            active = self._activate(layer.gate_up, gate_up, step)
            out = self._all_reduce_product(layer.down, active, step)
            x = self._norm(out, residual, self._norms[number], layer.down, step)
        return x

    def logits(self, hidden: Tensor, adapters: AdapterRows | None) -> Tensor:
        """Logits `[rows, vocab]`; with adapters the tensor's row stride is larger."""
        extent = 0 if adapters is None else adapters.extent
        out = self._library_product(self._head, hidden, extent)
        if adapters is not None:
            self._spread(self._head, out[0], adapters)
        return out[0, :, : self._head.out]

    def _step(self, rows: int, adapters: AdapterRows | None) -> _Step:
        """Few rows use our own products if these are better for most sites of a layer."""
        extent = 0 if adapters is None else adapters.extent
        sites = self._layers[0].sites
        assert self._parallel is None or adapters is None or not adapters.fused, "sums come first"
        few = rows <= FEW_ROWS and not self._invariant and (adapters is None or adapters.fused)
        few = few and self._parallel is None
        few = few and sum(site.tiling(extent) is not None for site in sites) >= _MOST_SITES
        preloaded = _PRELOADED_UNITS if few and extent > _CACHED_UNITS else 0
        return _Step(adapters, extent, few, early_start(few), preloaded)

    def _sites(self) -> list[CudaProductSite]:
        return [self._head, *(site for layer in self._layers for site in layer.sites)]

    def _product(self, site: CudaProductSite, x: Tensor, step: _Step) -> Tensor:
        """`[parts, rows, outputs and low-rank states]`; the next kernel adds the parts up."""
        if step.few:
            return site.few_rows_product(x, step.extent)
        out = self._library_product(site, x, step.extent)
        if step.adapters is not None and not step.adapters.fused:
            self._spread(site, out[0], step.adapters)
        return out

    def _all_reduce_product(self, site: CudaProductSite, x: Tensor, step: _Step) -> Tensor:
        """A row-parallel product, summed over the ranks that share the layers."""
        out = self._product(site, x, step)
        if self._parallel is None:
            return out
        whole = out[0, :, : site.out].contiguous()
        self._parallel.all_reduce(whole)
        return whole[None]

    def _embed(self, tokens: Tensor) -> Tensor:
        weight = self._net.model.embed_tokens.weight
        if self._parallel is None:
            return weight.index_select(0, tokens)
        return self._parallel.embed(tokens, weight, self._net.config.vocab_size)

    def _library_product(self, site: CudaProductSite, x: Tensor, extent: int) -> Tensor:
        return site.invariant_product(x, extent) if self._invariant else site.product(x, extent)

    def _spread(self, site: CudaProductSite, out: Tensor, adapters: AdapterRows) -> None:
        start, parts = 0, len(site.outs)
        for part, columns in enumerate(site.outs):
            spread_kernel[(len(adapters.tiles), triton.cdiv(columns, _SPREAD_BLOCK))](
                out, site.spread, adapters.tiles, out.stride(0), start, columns, site.out,
                site.out + part * UNIT, parts * UNIT,
                ROWS=DECODE_TILE if adapters.fused else PROMPT_TILE, BLOCK=_SPREAD_BLOCK,
                num_warps=4,
            )  # fmt: skip
            start += columns

    def _norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        site: CudaProductSite | None,
        step: _Step,
    ) -> Tensor:
        columns = len(weight)
        parts, rows = x.shape[:2]
        out = weight.new_empty(rows, columns)
        adapters = None if site is None else step.fused
        norm_kernel[(rows,)](
            x, x if residual is None else residual, weight, out, x if site is None else site.spread,
            x if adapters is None else adapters.rows, x.stride(1), x.stride(0), columns, self._eps,
            ADD=residual is not None, ADAPT=adapters is not None,
            BLOCK=triton.next_power_of_2(columns),
            CHUNK=min(_NORM_CHUNK, triton.next_power_of_2(columns)), PARTS=parts,
            num_warps=8 if adapters is None else 16, **step.early,
        )  # fmt: skip
        return out

    def _rotate(
        self, number: int, layer: _Layer, qkv: Tensor, attention: CudaPagedAttention, step: _Step
    ) -> Tensor:
        rows, (parts, length) = attention.rows, qkv.shape[:2]
        q = layer.norm.new_empty(length, self._heads, self._size)
        tiles = None if step.fused is None else step.fused.tiles
        count = triton.cdiv(length, DECODE_TILE) if tiles is None else len(tiles)
        rotate_kernel[(count, self._heads + 2 * self._kv_heads)](
            qkv, self._cos, self._sin, qkv if layer.q_norm is None else layer.q_norm,
            qkv if layer.k_norm is None else layer.k_norm, q, attention.cache, rows.tables,
            rows.slots, rows.positions, layer.qkv.spread,
            rows.positions if tiles is None else tiles, length, number, qkv.stride(1),
            qkv.stride(0), rows.tables.stride(0), attention.block_elements, self._eps,
            HEADS=self._heads, KV=self._kv_heads, D=self._size, TOKENS=BLOCK_TOKENS,
            NORM=layer.q_norm is not None, ADAPT=tiles is not None, ROWS=DECODE_TILE, PARTS=parts,
            PRELOADED=step.preloaded,
            num_warps=4, **step.early,
        )  # fmt: skip
        return q

    def _activate(self, site: CudaProductSite, gate_up: Tensor, step: _Step) -> Tensor:
        columns, (parts, rows) = site.outs[0], gate_up.shape[:2]
        out = site.spread.new_empty(rows, columns)
        tiles = None if step.fused is None else step.fused.tiles
        count = triton.cdiv(rows, DECODE_TILE) if tiles is None else len(tiles)
        silu_mul_kernel[(count, triton.cdiv(columns, _SILU_BLOCK))](
            gate_up, out, site.spread, gate_up if tiles is None else tiles, rows, columns,
            gate_up.stride(1), gate_up.stride(0),
            ADAPT=tiles is not None, ROWS=DECODE_TILE, BLOCK=_SILU_BLOCK, PARTS=parts,
            PRELOADED=step.preloaded,
            num_warps=4, **step.early,
        )  # fmt: skip
        return out
