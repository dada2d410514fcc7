"""A model as CUDA runs it: fused weights with room for adapters behind them, and one loop over the layers.

`nets/causal_lm.py` says what the model is, and the tests hold this pass to it. A layer is four products and five kernels:
rotation (which also stores keys and values), attention, norm, activation, norm. Adapters add no kernel to a decode step.
"""

from dataclasses import dataclass

import triton
from torch import Tensor

from slackwater.engine.cuda.adapter_rows import DECODE_TILE, PROMPT_TILE, AdapterRows
from slackwater.engine.cuda.attention import BLOCK_TOKENS, CudaPagedAttention
from slackwater.engine.cuda.rank_pool import UNIT
from slackwater.engine.cuda.row_kernels import (
    norm_kernel,
    rotate_kernel,
    silu_mul_kernel,
    spread_kernel,
)
from slackwater.engine.cuda.sites import Site
from slackwater.nets.causal_lm import CausalLM, Layer
from slackwater.nets.lora import LoraAdapter

_NORM_CHUNK = 4096
_SILU_BLOCK = 128
_SPREAD_BLOCK = 128


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Site
    o: Site
    gate_up: Site
    down: Site
    norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None

    @classmethod
    def of(cls, layer: Layer, number: int) -> "_Layer":
        attn, mlp, name = layer.self_attn, layer.mlp, f"model.layers.{number}."
        qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
        return cls(
            Site([getattr(attn, n) for n in qkv], [f"{name}self_attn.{n}" for n in qkv]),
            Site([attn.o_proj], [f"{name}self_attn.o_proj"]),
            Site([getattr(mlp, n) for n in gate_up], [f"{name}mlp.{n}" for n in gate_up]),
            Site([mlp.down_proj], [f"{name}mlp.down_proj"]),
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            None if attn.q_norm is None else attn.q_norm.weight,
            None if attn.k_norm is None else attn.k_norm.weight,
        )


class StraightPass:
    """Takes the linear layers' memory over from `net`, whose parameters become views of it."""

    def __init__(self, net: CausalLM, *, batch_invariant: bool) -> None:
        config = net.config
        self._net, self._invariant, self._eps = net, batch_invariant, config.norm_eps
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._size = config.head_dim
        layers = enumerate(net.model.layers)
        self._layers = [_Layer.of(layer, i) for i, layer in layers]  # type: ignore[arg-type]  # torch's list says Module
        head = net.model.embed_tokens if net.lm_head is None else net.lm_head
        self._head = Site([head], ["lm_head"])
        self._norms = [layer.norm for layer in self._layers[1:]] + [net.model.norm.weight]
        self._cos, self._sin = net.rotary.tables()
        self.units = 0

    def reserve(self, units: int) -> None:
        """Room for so many units of adapters; graphs captured before read memory that is gone."""
        self.units = units
        for site in self._sites():
            site.reserve(units)

    def put(self, adapter: LoraAdapter, first: int, units: int) -> None:
        for site in self._sites():
            site.put(adapter, first, units)

    def hidden(
        self,
        tokens: Tensor,
        attention: CudaPagedAttention,
        adapters: AdapterRows | None,
    ) -> Tensor:
        """Rows to `[rows, hidden]` after the last norm; their keys and values go into the cache."""
        residual = self._net.model.embed_tokens.weight.index_select(0, tokens)
        x = self._normed(residual, None, self._layers[0].norm, None, None)
        for number, layer in enumerate(self._layers):
            qkv = self._product(layer.qkv, x, adapters)
            q = self._rotated(number, layer, qkv, attention, adapters)
            seen = attention(number, q).view(len(q), -1)
            out = self._product(layer.o, seen, adapters)
            x = self._normed(out, residual, layer.mlp_norm, layer.o, adapters)
            gate_up = self._product(layer.gate_up, x, adapters)
            active = self._activated(layer.gate_up, gate_up, adapters)
            out = self._product(layer.down, active, adapters)
            x = self._normed(out, residual, self._norms[number], layer.down, adapters)
        return x

    def logits(self, hidden: Tensor, adapters: AdapterRows | None) -> Tensor:
        """Scores over the vocabulary, `[rows, vocab]`; a row is longer in memory where there are adapters."""
        out = self._product(self._head, hidden, adapters, fused=False)
        return out[:, : self._head.out]

    def _sites(self) -> list[Site]:
        layers = [(layer.qkv, layer.o, layer.gate_up, layer.down) for layer in self._layers]
        return [self._head, *(site for sites in layers for site in sites)]

    def _product(
        self, site: Site, x: Tensor, adapters: AdapterRows | None, *, fused: bool = True
    ) -> Tensor:
        extent = 0 if adapters is None else adapters.extent
        out = site.invariant_product(x, extent) if self._invariant else site.product(x, extent)
        if adapters is not None and not (adapters.fused and fused):
            self._spread(site, out, adapters)
        return out

    def _spread(self, site: Site, out: Tensor, adapters: AdapterRows) -> None:
        start, parts = 0, len(site.outs)
        for part, columns in enumerate(site.outs):
            spread_kernel[(len(adapters.tiles), triton.cdiv(columns, _SPREAD_BLOCK))](
                out,
                site.spread,
                adapters.tiles,
                out.stride(0),
                start,
                columns,
                site.out,
                site.out + part * UNIT,
                parts * UNIT,
                ROWS=DECODE_TILE if adapters.fused else PROMPT_TILE,
                BLOCK=_SPREAD_BLOCK,
                num_warps=4,
            )
            start += columns

    def _normed(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        site: Site | None,
        adapters: AdapterRows | None,
    ) -> Tensor:
        columns = len(weight)
        out = x.new_empty(len(x), columns)
        adapted = adapters is not None and adapters.fused and site is not None
        norm_kernel[(len(x),)](
            x,
            x if residual is None else residual,
            weight,
            out,
            site.spread if adapted and site is not None else x,
            adapters.rows if adapted and adapters is not None else x,
            x.stride(0),
            columns,
            self._eps,
            ADD=residual is not None,
            ADAPT=adapted,
            BLOCK=triton.next_power_of_2(columns),
            CHUNK=min(_NORM_CHUNK, triton.next_power_of_2(columns)),
            num_warps=16 if adapted else 8,
        )
        return out

    def _rotated(
        self,
        number: int,
        layer: _Layer,
        qkv: Tensor,
        attention: CudaPagedAttention,
        adapters: AdapterRows | None,
    ) -> Tensor:
        rows = attention.rows
        q = qkv.new_empty(len(qkv), self._heads, self._size)
        tiles = None if adapters is None or not adapters.fused else adapters.tiles
        count = triton.cdiv(len(qkv), DECODE_TILE) if tiles is None else len(tiles)
        rotate_kernel[(count, self._heads + 2 * self._kv_heads)](
            qkv,
            self._cos,
            self._sin,
            qkv if layer.q_norm is None else layer.q_norm,
            qkv if layer.k_norm is None else layer.k_norm,
            q,
            attention.cache,
            rows.tables,
            rows.slots,
            rows.positions,
            layer.qkv.spread,
            rows.positions if tiles is None else tiles,
            len(qkv),
            number,
            qkv.stride(0),
            rows.tables.stride(0),
            attention.block_elements,
            self._eps,
            HEADS=self._heads,
            KV=self._kv_heads,
            D=self._size,
            TOKENS=BLOCK_TOKENS,
            NORM=layer.q_norm is not None,
            ADAPT=tiles is not None,
            ROWS=DECODE_TILE,
            num_warps=4,
        )
        return q

    def _activated(self, site: Site, gate_up: Tensor, adapters: AdapterRows | None) -> Tensor:
        columns = site.outs[0]
        out = gate_up.new_empty(len(gate_up), columns)
        tiles = None if adapters is None or not adapters.fused else adapters.tiles
        count = triton.cdiv(len(gate_up), DECODE_TILE) if tiles is None else len(tiles)
        silu_mul_kernel[(count, triton.cdiv(columns, _SILU_BLOCK))](
            gate_up,
            out,
            site.spread,
            gate_up if tiles is None else tiles,
            len(gate_up),
            columns,
            gate_up.stride(0),
            ADAPT=tiles is not None,
            ROWS=DECODE_TILE,
            BLOCK=_SILU_BLOCK,
            num_warps=4,
        )
        return out
