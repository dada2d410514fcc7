"""The causal language model: Hugging Face's parameter names, packed tokens, attention passed in.

One class covers Llama, Qwen2 and Qwen3; they differ only in biases and in the per-head norm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slackwater.nets.config import NetConfig, RopeScaling
from slackwater.nets.lora import LoraAdapter
from slackwater.nets.ops import AdaptedWeight, HeadNorms, NetOps, Rotation
from slackwater.nets.tensor_parallel import TensorParallel


def inverse_frequencies(config: NetConfig) -> Tensor:
    """One frequency per pair of head dimensions, float32 on the CPU, scaled as configured."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _scale_by_wavelength(frequencies, scaling)


def _scale_by_wavelength(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    original = scaling.original_max_positions
    longest_kept = original / scaling.high_freq_factor
    shortest_stretched = original / scaling.low_freq_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = frequencies / scaling.factor
    blend = (original / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - blend) * stretched + blend * frequencies
    result = torch.where(wavelengths > shortest_stretched, stretched, frequencies)
    medium = (wavelengths <= shortest_stretched) & (wavelengths >= longest_kept)
    return torch.where(medium, between, result)


class RotaryTable:
    """Cosines and sines of every position, `[positions, head_dim / 2]` each."""

    def __init__(self, config: NetConfig) -> None:
        self._config = config
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    def fill(self, device: torch.device, dtype: torch.dtype) -> None:
        """Fill the table, on the device and in the type of the model."""
        rounded = max(256, 1 << (self._config.max_positions - 1).bit_length())
        angles = torch.outer(torch.arange(rounded).float(), inverse_frequencies(self._config))
        self._cos = angles.cos().to(device=device, dtype=dtype)
        self._sin = angles.sin().to(device=device, dtype=dtype)

    def lookup(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of `positions`."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def tables(self) -> tuple[Tensor, Tensor]:
        return self._cos, self._sin


class Attention(Protocol):
    """The attention of one layer over all rows; it may cache keys and values."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [N, heads, d]`, `k`, `v [N, kv_heads, d]` to `[N, heads, d]`."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What the layers of one pass share: rotation, attention, operators, adapter and ranks."""

    rotation: Rotation
    attention: Attention
    ops: NetOps
    adapter: LoraAdapter | None
    parallel: TensorParallel | None = None

    def enter(self, x: Tensor) -> Tensor:
        """The input of column-parallel products: its gradients are summed over the ranks."""
        return x if self.parallel is None else self.parallel.enter(x)

    def leave(self, x: Tensor, layer: nn.Linear, name: str) -> Tensor:
        """A row-parallel product, summed over the ranks; the bias is added once."""
        if self.parallel is None:
            return self.linears(x, ((layer, name),))[0]
        named = ((layer.weight, None, name),)
        out = self.parallel.sum(apply_linears(x, named, self.adapter, self.ops)[0])
        return out if layer.bias is None else out + layer.bias

    def linears(self, x: Tensor, layers: Sequence[tuple[nn.Linear, str]]) -> tuple[Tensor, ...]:
        """Several layers of one input, each with its adapter's update."""
        named = [(layer.weight, layer.bias, name) for layer, name in layers]
        return apply_linears(x, named, self.adapter, self.ops)


def apply_linears(
    x: Tensor,
    layers: Sequence[tuple[Tensor, Tensor | None, str]],
    adapter: LoraAdapter | None,
    ops: NetOps,
) -> tuple[Tensor, ...]:
    """The outputs for x of layers given as `weight, bias, name`, with the adapter's updates."""
    pairs = [
        (None if adapter is None else adapter.pair(name)) or (None, None) for *_, name in layers
    ]
    whole = [
        AdaptedWeight(weight, bias, *pair)
        for (weight, bias, _), pair in zip(layers, pairs, strict=True)
    ]
    return ops.linears(x, whole, 1.0 if adapter is None else adapter.spec.scale)


class RmsNorm(nn.Module):
    """Only holds the weight; `NetOps` computes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class SelfAttention(nn.Module):
    """Query, key, value and output projections around the attention of the pass."""

    def __init__(self, config: NetConfig, layer: int, ranks: int) -> None:
        super().__init__()
        self._layer, self._name = layer, f"model.layers.{layer}.self_attn."
        self._head_dim, self._eps = config.head_dim, config.norm_eps
        heads = config.num_heads // ranks * config.head_dim
        kv_heads = config.num_kv_heads // ranks * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=config.o_bias)
        self.q_norm = RmsNorm(config.head_dim) if config.qk_norm else None
        self.k_norm = RmsNorm(config.head_dim) if config.qk_norm else None

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        norms = HeadNorms(self._head_dim, q_norm, k_norm, self._eps)
        layers = ((self.q_proj, "q_proj"), (self.k_proj, "k_proj"), (self.v_proj, "v_proj"))
        q, k, v = run.linears(run.enter(x), [(layer, self._name + name) for layer, name in layers])
        q, k, v = run.ops.rotate((q, k, v), run.rotation, norms)
        seen = run.attention(self._layer, q, k, v).reshape(x.shape[0], -1)
        return run.leave(seen, self.o_proj, f"{self._name}o_proj")


class Mlp(nn.Module):
    """The gated MLP: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: NetConfig, layer: int, ranks: int) -> None:
        super().__init__()
        self._name = f"model.layers.{layer}.mlp."
        size, ffn, bias = config.hidden_size, config.ffn_size // ranks, config.mlp_bias
        self.gate_proj = nn.Linear(size, ffn, bias=bias)
        self.up_proj = nn.Linear(size, ffn, bias=bias)
        self.down_proj = nn.Linear(ffn, size, bias=bias)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        layers = ((self.gate_proj, "gate_proj"), (self.up_proj, "up_proj"))
        gate, up = run.linears(run.enter(x), [(layer, self._name + name) for layer, name in layers])
        return run.leave(run.ops.silu_mul(gate, up), self.down_proj, f"{self._name}down_proj")


class Layer(nn.Module):
    """Attention and MLP, each after a norm; the residual is passed along separately."""

    def __init__(self, config: NetConfig, layer: int, ranks: int) -> None:
        super().__init__()
        self._eps = config.norm_eps
        self.self_attn = SelfAttention(config, layer, ranks)
        self.mlp = Mlp(config, layer, ranks)
        self.input_layernorm = RmsNorm(config.hidden_size)
        self.post_attention_layernorm = RmsNorm(config.hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None, run: Pass) -> tuple[Tensor, Tensor]:
        norm = self.input_layernorm.weight
        if residual is None:
            residual, x = x, run.ops.rms_norm(x, norm, self._eps)
        else:
            x, residual = run.ops.add_rms_norm(x, residual, norm, self._eps)
        x = self.self_attn(x, run)
        norm = self.post_attention_layernorm.weight
        x, residual = run.ops.add_rms_norm(x, residual, norm, self._eps)
        return self.mlp(x, run), residual


class Decoder(nn.Module):
    """Embedding, layers and the last norm: what Hugging Face calls `model`."""

    def __init__(self, config: NetConfig, vocab_size: int, ranks: int) -> None:
        super().__init__()
        # nn.Embedding's own initialisation imports torch's compiler on the meta device, which
        # costs 2 s at every worker's start.
        unset = torch.empty(vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size, _weight=unset)
        self.layers = nn.ModuleList(Layer(config, i, ranks) for i in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size)


class CausalLM(nn.Module):
    """The model: tokens to hidden states and logits. Rows are tokens of any number of sequences.

    With `parallel` it is one rank's part: `config` is the whole model's, the parameters are slices.
    """

    def __init__(self, config: NetConfig, parallel: TensorParallel | None = None) -> None:
        super().__init__()
        self.config, self.parallel = config, parallel
        ranks, first, stop = 1, 0, config.vocab_size
        if parallel is not None:
            parallel.check(config)
            ranks, (first, stop) = parallel.size, parallel.vocabulary(config.vocab_size)
        self.model = Decoder(config, stop - first, ranks)
        self.lm_head = (
            None if config.tied else nn.Linear(config.hidden_size, stop - first, bias=False)
        )
        self.rotary = RotaryTable(config)
        self.plain_ops = NetOps()

    @property
    def rank_config(self) -> NetConfig:
        """The shape that this process computes: the whole model's, or its rank's part."""
        return self.config if self.parallel is None else self.parallel.config_of(self.config)

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def run_layers(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        *,
        adapter: LoraAdapter | None = None,
        ops: NetOps | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """`tokens [N]` at `positions [N]` to `[N, hidden]` after the last norm.

        Positions are below `config.max_positions`. `recompute` keeps only each layer's input for
        the backward pass, and computes the rest again.
        """
        ops = ops or self.plain_ops
        rotation = Rotation(*self.rotary.lookup(positions))
        run = Pass(rotation, attention, ops, adapter, self.parallel)
        x, residual = self._embed(tokens), None
        for layer in self.model.layers:
            if recompute:
                x, residual = checkpoint(layer, x, residual, run, use_reentrant=False)
            else:
                x, residual = layer(x, residual, run)
        assert residual is not None, "a model has at least one layer"
        norm = self.model.norm.weight
        return ops.add_rms_norm(x, residual, norm, self.config.norm_eps)[0]

    def logits(
        self, hidden: Tensor, *, adapter: LoraAdapter | None = None, ops: NetOps | None = None
    ) -> Tensor:
        """Logits over the vocabulary, or over this rank's part of it, for each row."""
        if self.parallel is not None:
            hidden = self.parallel.enter(hidden)
        layer = self.model.embed_tokens if self.lm_head is None else self.lm_head
        head = (layer.weight, None, "lm_head")
        return apply_linears(hidden, (head,), adapter, ops or self.plain_ops)[0]

    def gather_logits(self, scores: Tensor) -> Tensor:
        """The logits of all ranks, concatenated, on rank 0; the other ranks keep their own."""
        if self.parallel is None:
            return scores
        whole = self.parallel.gather_columns(scores, self.config.vocab_size)
        return scores if whole is None else whole

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.parallel is None:
            rows: Tensor = self.model.embed_tokens(tokens)
            return rows
        weight = self.model.embed_tokens.weight
        return self.parallel.embed(tokens, weight, self.config.vocab_size)
