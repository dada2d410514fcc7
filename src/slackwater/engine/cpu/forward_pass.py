"""The CPU's forward pass: weights as products read them, and one loop on reused buffers.

`nets/causal_lm.py` defines the model, and the tests compare this pass with it. A step of a small
model would otherwise spend its time in Python modules, views and allocations.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from slackwater.engine.cpu.attention import attend_rows
from slackwater.engine.cpu.ops import add_and_norm_rows, norm_rows, silu_mul_rows
from slackwater.engine.cpu.panel_writer import PanelWriter
from slackwater.engine.cpu.weights import AdapterSpans, Floats, NewWeight, ProductSite, apply
from slackwater.nets.causal_lm import CausalLM, Layer, RmsNorm
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import net_tensors

_NO_NORM = np.empty(0, np.float32)
_KEPT_BUFFERS = 16  # numbers of rows whose buffers are kept


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: ProductSite
    o: ProductSite
    gate_up: ProductSite
    down: ProductSite
    norm: Floats
    mlp_norm: Floats
    q_norm: Floats
    k_norm: Floats


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where each row's keys and values are stored: its line of the block tables, its position."""

    cache: Floats
    block_floats: np.uint64
    tables: NDArray[np.int32]
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]


class _Buffers:
    """Intermediate results of a pass, for a number of rows."""

    def __init__(self, config: NetConfig, rows: int) -> None:
        heads, size = config.num_heads, config.head_dim
        self.residual = np.empty((rows, config.hidden_size), np.float32)
        self.normed = np.empty((rows, config.hidden_size), np.float32)
        self.qkv = np.empty((rows, (heads + 2 * config.num_kv_heads) * size), np.float32)
        self.attended = np.empty((rows, heads * size), np.float32)
        self.gate_up = np.empty((rows, 2 * config.ffn_size), np.float32)
        self.gated = np.empty((rows, config.ffn_size), np.float32)


class CpuForwardPass:
    """Takes over the linear layers' memory: the parameters of `net` keep only their shapes."""

    def __init__(self, net: CausalLM, new_weight: NewWeight) -> None:
        config = net.rank_config
        self._parallel, self._vocab_size = net.parallel, net.config.vocab_size
        self._new_weight = new_weight
        self._config, self._eps = config, np.float32(config.norm_eps)
        self._part_sites: dict[str, tuple[ProductSite, int]] = {}
        self._embedding: Floats = net.model.embed_tokens.weight.detach().numpy()
        self._layers = [self._layer(net, number) for number in range(config.num_layers)]
        self._last_norm = _norm(net.model.norm)
        unembedding = net.lm_head
        if unembedding is None:
            unembedding = nn.Linear(
                config.hidden_size, config.vocab_size, bias=False, device="meta"
            )
            unembedding.weight = nn.Parameter(net.model.embed_tokens.weight.detach())
        self._unembedding = self._site({"lm_head": unembedding})
        named = net_tensors(net).items()
        self._plain_tensors = {name: tensor for name, tensor in named if not tensor.is_meta}
        self._norms = [layer.norm for layer in self._layers[1:]] + [self._last_norm]
        cos, sin = net.rotary.lookup(torch.arange(config.max_positions))
        self._cos, self._sin = cos.reshape(-1).numpy(), sin.reshape(-1).numpy()
        self._buffers: dict[int, _Buffers] = {}
        self._logits = np.empty((0, config.vocab_size), np.float32)

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        writer = PanelWriter()
        for name, tensor in tensors.items():
            layer, _, kind = name.rpartition(".")
            values = _host_floats(tensor)
            if name in self._plain_tensors:
                writer.add_copy(values, self._plain_tensors[name])
            elif layer in self._part_sites:
                self._write_part(layer, kind, values, writer)
            if tensor.dtype != torch.float32:
                writer.run()  # one converted copy at a time
        if self._config.tied:
            self._write_part(
                "lm_head", "weight", self._plain_tensors["model.embed_tokens.weight"], writer
            )
        writer.run()

    def sites(self) -> Iterator[ProductSite]:
        """Every product, the unembedding last."""
        for layer in self._layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)
        yield self._unembedding

    def run_layers(self, tokens: NDArray[np.int64], rows: PagedRows, spans: AdapterSpans) -> Floats:
        """The rows after the last norm, in memory that the next pass overwrites."""
        buffers, eps = self._get_buffers(len(tokens)), self._eps
        heads, kv_heads = np.uint64(self._config.num_heads), np.uint64(self._config.num_kv_heads)
        residual, normed = buffers.residual, buffers.normed
        self._embed(tokens, residual)
        norm_rows(residual, self._layers[0].norm, eps, normed)
        for number, layer in enumerate(self._layers):
            apply(layer.qkv, normed, buffers.qkv, spans)
            attend_rows(
                buffers.qkv.reshape(-1), layer.q_norm, layer.k_norm, eps, self._cos, self._sin,
                rows.cache, np.uint64(number), rows.block_floats, rows.tables, rows.slots,
                rows.positions, heads, kv_heads, buffers.attended.reshape(-1),
            )  # fmt: skip
            apply(layer.o, buffers.attended, normed, spans)
            self._all_reduce(normed)
            add_and_norm_rows(normed, residual, layer.mlp_norm, eps, normed)
            apply(layer.gate_up, normed, buffers.gate_up, spans)
            silu_mul_rows(buffers.gate_up, buffers.gated)
            apply(layer.down, buffers.gated, normed, spans)
            self._all_reduce(normed)
            add_and_norm_rows(normed, residual, self._norms[number], eps, normed)
        return normed

    def logits(self, hidden: Floats, spans: AdapterSpans) -> Floats:
        """Logits of the rows, in memory that the next pass overwrites."""
        rows = len(hidden)
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._config.vocab_size), np.float32)
        out = self._logits[:rows]
        apply(self._unembedding, hidden, out, spans)
        return out

    def _embed(self, tokens: NDArray[np.int64], out: Floats) -> None:
        if self._parallel is None:
            np.take(self._embedding, tokens, axis=0, out=out, mode="clip")
            return
        first, stop = self._parallel.vocabulary(self._vocab_size)
        here = (tokens >= first) & (tokens < stop)
        np.take(self._embedding, np.where(here, tokens - first, 0), axis=0, out=out, mode="clip")
        out[~here] = 0
        self._all_reduce(out)

    def _all_reduce(self, rows: Floats) -> None:
        if self._parallel is not None:
            self._parallel.all_reduce(torch.from_numpy(rows))

    def _layer(self, net: CausalLM, number: int) -> _Layer:
        layer = net.model.layers[number]
        assert isinstance(layer, Layer)
        attention, mlp = layer.self_attn, layer.mlp
        place = f"model.layers.{number}"
        qkv = {"q_proj": attention.q_proj, "k_proj": attention.k_proj, "v_proj": attention.v_proj}
        return _Layer(
            qkv=self._site({f"{place}.self_attn.{name}": part for name, part in qkv.items()}),
            o=self._site({f"{place}.self_attn.o_proj": attention.o_proj}),
            gate_up=self._site(
                {f"{place}.mlp.gate_proj": mlp.gate_proj, f"{place}.mlp.up_proj": mlp.up_proj}
            ),
            down=self._site({f"{place}.mlp.down_proj": mlp.down_proj}),
            norm=_norm(layer.input_layernorm),
            mlp_norm=_norm(layer.post_attention_layernorm),
            q_norm=_norm(attention.q_norm),
            k_norm=_norm(attention.k_norm),
        )

    def _site(self, parts: Mapping[str, nn.Linear]) -> ProductSite:
        stops = list(accumulate(part.out_features for part in parts.values()))
        starts, depth = (0, *stops[:-1]), next(iter(parts.values())).in_features
        biased = all(part.bias is not None for part in parts.values())
        bias = np.zeros(stops[-1], np.float32) if biased else None
        site = ProductSite(
            tuple(parts), starts, stops[-1], self._new_weight(stops[-1], depth), bias
        )
        writer = PanelWriter()
        for (name, part), start in zip(parts.items(), starts, strict=True):
            self._part_sites[name] = (site, start)
            for kind, parameter in list(part.named_parameters()):
                self._write_part(name, kind, parameter.detach(), writer)
                shape = torch.empty(parameter.shape, device="meta")
                part.register_parameter(kind, nn.Parameter(shape, requires_grad=False))
        writer.run()
        return site

    def _write_part(self, layer: str, kind: str, values: torch.Tensor, writer: PanelWriter) -> None:
        site, start = self._part_sites[layer]
        if kind == "weight":
            site.weight.write(start, values, writer)
        else:
            assert site.bias is not None
            row_parallel = layer.endswith(("o_proj", "down_proj"))
            if row_parallel and self._parallel is not None and self._parallel.rank:
                values = torch.zeros_like(values)  # rank 0 alone adds the bias to the sum
            writer.add_copy(values, torch.from_numpy(site.bias[start : start + len(values)]))

    def _get_buffers(self, rows: int) -> _Buffers:
        """Buffers for so many rows; those of a few batch sizes are kept."""
        found = self._buffers.get(rows)
        if found is None:
            if len(self._buffers) >= _KEPT_BUFFERS:
                self._buffers.clear()
            found = self._buffers[rows] = _Buffers(self._config, rows)
        return found


def _norm(norm: RmsNorm | None) -> Floats:
    return _NO_NORM if norm is None else norm.weight.detach().numpy()


def _host_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Convert only if necessary: each PyTorch call waits for the interpreter's lock again."""
    if tensor.dtype != torch.float32 or tensor.is_cuda or tensor.requires_grad:
        tensor = tensor.detach().to("cpu", torch.float32)
    return tensor
