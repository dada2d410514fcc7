"""Low-rank adapters on named linear layers.

Names are peft's (`base_model.model.<layer>.lora_A.weight`), so that adapters move between tools.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from slackwater.model.adapter_config import adapter_config
from slackwater.model.errors import ConfigError
from slackwater.nets.config import NetConfig
from slackwater.nets.tensor_parallel import TensorParallel
from slackwater.weights.plan.layout import Layout
from slackwater.weights.plan.shard_map import Box, RankShards, ShardMap

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Which layers are adapted, with which rank and scale; the update is `alpha / rank * B @ A`."""

    rank: int
    alpha: float = 32.0
    seed: int = 0
    attn: bool = True
    mlp: bool = True
    unembed: bool = True

    def __post_init__(self) -> None:
        if self.rank <= 0:
            raise ConfigError.of("lora rank", self.rank, "must be above 0 (0 is full fine-tuning)")
        if not (self.attn or self.mlp or self.unembed):
            raise ConfigError.of("lora layers", "none", "must train attn, mlp or unembed")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def shapes(self, config: NetConfig) -> dict[str, tuple[int, int]]:
        """`(out, in)` of every adapted layer, by its name in the model."""
        d, ffn = config.hidden_size, config.ffn_size
        heads = config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim
        attention = {"q_proj": (heads, d), "k_proj": (kv_heads, d), "v_proj": (kv_heads, d)}
        attention["o_proj"] = (d, heads)
        mlp = {"gate_proj": (ffn, d), "up_proj": (ffn, d), "down_proj": (d, ffn)}
        shapes: dict[str, tuple[int, int]] = {}
        for layer in range(config.num_layers):
            if self.attn:
                for name, shape in attention.items():
                    shapes[f"model.layers.{layer}.self_attn.{name}"] = shape
            if self.mlp:
                for name, shape in mlp.items():
                    shapes[f"model.layers.{layer}.mlp.{name}"] = shape
        if self.unembed:
            shapes["lm_head"] = (config.vocab_size, d)
        return shapes

    def tensor_shapes(self, config: NetConfig) -> dict[str, tuple[int, ...]]:
        """The shapes of both factors of every adapted layer, by peft's names."""
        return {
            name: shape
            for layer, (rows, columns) in self.shapes(config).items()
            for name, shape in zip(
                _factors(layer), ((self.rank, columns), (rows, self.rank)), strict=True
            )
        }

    def peft_config(self) -> dict[str, Any]:
        """The fields of a peft `adapter_config.json`."""
        return adapter_config(
            self.rank, self.alpha, attn=self.attn, mlp=self.mlp, unembed=self.unembed
        )


def lora_meta(lora: LoraSpec | None) -> dict[str, Any]:
    """The `meta` of a version: whether its tensors are an adapter, and of which shape."""
    return {"lora": None if lora is None else asdict(lora)}


def lora_of(meta: Mapping[str, Any]) -> LoraSpec | None:
    """The adapter's shape that `lora_meta` wrote, or None for whole weights."""
    lora = meta.get("lora")
    return None if lora is None else LoraSpec(**lora)


def _factors(layer: str) -> tuple[str, str]:
    return f"{_PREFIX}{layer}.lora_A.weight", f"{_PREFIX}{layer}.lora_B.weight"


def _shards(spec: LoraSpec, config: NetConfig, parallel: TensorParallel | None) -> RankShards:
    """A rank's slices of an adapter."""
    shapes = spec.tensor_shapes(config)
    if parallel is None:
        return RankShards.whole(shapes)
    return ShardMap(shapes, config.head_dim, Layout(tp=parallel.size)).rank(parallel.rank)


class LoraAdapter:
    """The two factors of every adapted layer; `version` is its name in an engine."""

    version = ""

    def __init__(
        self,
        spec: LoraSpec,
        config: NetConfig,
        tensors: Mapping[str, Tensor],
        parallel: TensorParallel | None = None,
    ) -> None:
        self.spec = spec
        self.tensors = dict(tensors)
        wanted = _shards(spec, config, parallel).shapes
        for name, shape in wanted.items():
            seen = tuple(tensors[name].shape) if name in tensors else "missing"
            if seen != shape:
                raise ConfigError.of(f"adapter tensor {name}", seen, f"must be {shape}")
        if extra := tensors.keys() - wanted.keys():
            raise ConfigError.of("adapter tensors", sorted(extra)[:3], "are not of this adapter")
        pairs = ((layer, _factors(layer)) for layer in spec.shapes(config))
        self._pairs = {layer: (self.tensors[a], self.tensors[b]) for layer, (a, b) in pairs}

    @classmethod
    def create(
        cls,
        spec: LoraSpec,
        config: NetConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        parallel: TensorParallel | None = None,
    ) -> "LoraAdapter":
        """An adapter without effect (A random by the seed, B zero), or a rank's slices of it."""
        generator = torch.Generator().manual_seed(spec.seed)
        shards, tensors = _shards(spec, config, parallel), {}
        boxes = {piece.tensor: piece.box for piece in shards.pieces}
        for layer, (_, columns) in spec.shapes(config).items():
            bound, (first, second) = 1 / math.sqrt(columns), _factors(layer)
            drawn = torch.empty(spec.rank, columns).uniform_(-bound, bound, generator=generator)
            own = drawn[boxes[first].index_in(Box.whole(drawn.shape))].contiguous()
            tensors[first] = own.to(device=device, dtype=dtype)
            tensors[second] = torch.zeros(shards.shapes[second], dtype=dtype, device=device)
        return cls(spec, config, tensors, parallel)

    def pair(self, layer: str) -> tuple[Tensor, Tensor] | None:
        """`(A, B)` of a layer, or None if it is not adapted."""
        return self._pairs.get(layer)
