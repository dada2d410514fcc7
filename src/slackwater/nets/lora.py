"""Low-rank adapters on named linear layers.

Names are peft's (`base_model.model.<layer>.lora_A.weight`), so that adapters move between tools.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slackwater.model.adapter_config import adapter_config
from slackwater.model.errors import ConfigError
from slackwater.nets.config import NetConfig
from slackwater.nets.tensor_parallel import TensorParallel

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Which layers are adapted and how; the update is `alpha / rank * B @ A`."""

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
        """Both factors of every adapted layer, by peft's names."""
        return {
            f"{_PREFIX}{layer}.lora_{factor}.weight": shape
            for layer, (rows, columns) in self.shapes(config).items()
            for factor, shape in (("A", (self.rank, columns)), ("B", (rows, self.rank)))
        }

    def peft_config(self, base_model: str | None = None) -> dict[str, Any]:
        """The fields of a peft `adapter_config.json`."""
        return adapter_config(
            self.rank,
            self.alpha,
            attn=self.attn,
            mlp=self.mlp,
            unembed=self.unembed,
            base_model=base_model,
        )


def _slices(
    layer: str, shape: tuple[int, int], parallel: TensorParallel | None
) -> tuple[slice, slice]:
    """The rows and columns of a layer that a rank computes."""
    rows, columns = (slice(0, size) for size in shape)
    if parallel is None:
        return rows, columns
    if layer == "lm_head":
        return slice(*parallel.vocabulary(shape[0])), columns
    cut_by_columns = layer.endswith(("o_proj", "down_proj"))
    each = shape[1 if cut_by_columns else 0] // parallel.size
    mine = slice(parallel.rank * each, (parallel.rank + 1) * each)
    return (rows, mine) if cut_by_columns else (mine, columns)


class LoraAdapter:
    """The two factors of every adapted layer; `version` is what an engine calls it."""

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
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}
        expected: set[str] = set()
        for layer, (rows, columns) in spec.shapes(config).items():
            names = (f"{_PREFIX}{layer}.lora_A.weight", f"{_PREFIX}{layer}.lora_B.weight")
            expected.update(names)
            out, into = _slices(layer, (rows, columns), parallel)
            wanted = ((spec.rank, into.stop - into.start), (out.stop - out.start, spec.rank))
            for name, shape in zip(names, wanted, strict=True):
                if name not in tensors or tuple(tensors[name].shape) != shape:
                    seen = tuple(tensors[name].shape) if name in tensors else "missing"
                    raise ConfigError.of(f"adapter tensor {name}", seen, f"must be {shape}")
            self._pairs[layer] = (self.tensors[names[0]], self.tensors[names[1]])
        extra = set(tensors) - expected
        if extra:
            raise ConfigError.of("adapter tensors", sorted(extra)[:3], "are not of this adapter")

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
        """An adapter without effect (A random from the seed, B zero), or a rank's slices."""
        generator = torch.Generator().manual_seed(spec.seed)
        tensors = {}
        for layer, (rows, columns) in spec.shapes(config).items():
            bound = 1 / math.sqrt(columns)
            first = torch.empty(spec.rank, columns).uniform_(-bound, bound, generator=generator)
            out, into = _slices(layer, (rows, columns), parallel)
            first = first[:, into].contiguous()
            tensors[f"{_PREFIX}{layer}.lora_A.weight"] = first.to(device=device, dtype=dtype)
            second = torch.zeros(out.stop - out.start, spec.rank, dtype=dtype, device=device)
            tensors[f"{_PREFIX}{layer}.lora_B.weight"] = second
        return cls(spec, config, tensors, parallel)

    def parameters(self) -> Iterator[Tensor]:
        """In a fixed order: that of the layers, A before B."""
        return iter(self.tensors.values())

    def require_grad(self) -> "LoraAdapter":
        """Make every factor trainable, in place."""
        for tensor in self.tensors.values():
            tensor.requires_grad_(True)
        return self

    def pair(self, layer: str) -> tuple[Tensor, Tensor] | None:
        """`(A, B)` of a layer, or None where it is not adapted."""
        return self._pairs.get(layer)
