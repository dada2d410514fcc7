"""The shape of a causal language model, read from or written to a Hugging Face `config.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slackwater.model.errors import ConfigError, check_above_zero

FAMILIES = ("llama", "qwen2", "qwen3")
_CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


# Sizes that every Hugging Face configuration has, by the names of our fields.
_HF_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched: `linear`, or Llama 3's by wavelength."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ConfigError.of("rope_type", self.kind, "is not supported; use linear or llama3")


@dataclass(frozen=True, slots=True)
class NetConfig:
    """Everything the model definition depends on. Defaults are a tiny Llama for tests."""

    family: str = "llama"
    vocab_size: int = 261
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    ffn_size: int = 256
    max_positions: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tied: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    init_std: float = 0.02
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError.of("model_type", self.family, f"must be one of {', '.join(FAMILIES)}")
        sizes = ("num_kv_heads", "head_dim", "max_positions", *_HF_SIZES)
        check_above_zero("", self, *sizes)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError.of(
                "num_key_value_heads", self.num_kv_heads, f"must divide {self.num_heads} heads"
            )
        if self.head_dim % 2:
            raise ConfigError.of("head_dim", self.head_dim, "must be even for rotary positions")

    @classmethod
    def from_directory(cls, directory: Path) -> "NetConfig":
        """Read `config.json`, and the end-of-sequence ids of `generation_config.json` if there."""
        path = directory / "config.json"
        if not path.is_file():
            raise ConfigError.of("model", str(directory), "must be a folder with a config.json")
        raw = json.loads(path.read_text())
        generation = directory / "generation_config.json"
        if generation.is_file():
            eos = json.loads(generation.read_text()).get("eos_token_id")
            if eos is not None:
                raw["eos_token_id"] = eos
        return cls.from_hf(raw)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "NetConfig":
        """From the fields of a Hugging Face configuration, of transformers 4 or 5."""
        family = str(raw.get("model_type"))
        if family not in FAMILIES:
            raise ConfigError.of("model_type", family, f"must be one of {', '.join(FAMILIES)}")
        if raw.get("use_sliding_window"):
            raise ConfigError.of("use_sliding_window", True, "is not supported; set it to false")
        if raw.get("hidden_act", "silu") != "silu":
            raise ConfigError.of("hidden_act", raw["hidden_act"], "is not supported; use silu")
        heads = int(raw["num_attention_heads"])
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        bias = bool(raw.get("attention_bias", False))
        return cls(
            family=family,
            **{field: int(raw[name]) for field, name in _HF_SIZES.items()},
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(rope),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias and family != "qwen2",
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            init_std=float(raw.get("initializer_range", 0.02)),
            eos_token_ids=_ids(raw.get("eos_token_id")),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of a Hugging Face `config.json`, that transformers 4 and 5 both read."""
        scaling = self.rope_scaling
        rope: dict[str, Any] = {"rope_type": "default"}
        if scaling is not None:
            rope = {"rope_type": scaling.kind, "factor": scaling.factor}
            if scaling.kind == "llama3":
                rope |= {
                    "low_freq_factor": scaling.low_freq_factor,
                    "high_freq_factor": scaling.high_freq_factor,
                    "original_max_position_embeddings": scaling.original_max_positions,
                }
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        fields: dict[str, Any] = {
            "architectures": [_CLASS_NAMES[self.family]],
            "model_type": self.family,
            **{name: getattr(self, field) for field, name in _HF_SIZES.items()},
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rope_parameters": rope | {"rope_theta": self.rope_theta},
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.qkv_bias and self.family != "qwen2",
            "mlp_bias": self.mlp_bias,
            "hidden_act": "silu",
            "initializer_range": self.init_std,
            "eos_token_id": eos,
        }
        if scaling is not None:
            fields["rope_scaling"] = rope
        return fields

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values that one token leaves in the cache, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, whether they are there or not."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [directory / "model.safetensors"]
    return [
        directory / name
        for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
    ]


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    return RopeScaling(
        kind=str(kind),
        factor=float(rope.get("factor", 1.0)),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_max_positions=int(rope.get("original_max_position_embeddings", 8192)),
    )
