"""An engine's costs from hardware rates, model shapes and usual efficiencies, never from outcomes:
prefill by compute, decode by memory bandwidth and compute, KV by capacity.
"""

from dataclasses import dataclass
from typing import Protocol

from slackwater.model.errors import ConfigError
from slackwater.policy.serving.step_cost import StepCost

_SIZES = (1, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 16_384)


class CostModel(Protocol):
    """The costs of a simulated engine: from hardware rates (`EngineCost`), or measured."""

    @property
    def kv_tokens(self) -> int: ...

    @property
    def context_s(self) -> float: ...

    @property
    def weight_bytes(self) -> float: ...

    def step_s(self, batch: int) -> float: ...

    def prefill_s(self, tokens: int, context_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides its cost (RLBoost Table 4; bf16 weights and cache)."""

    name: str
    billions: float
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int = 128

    @property
    def weight_bytes(self) -> float:
        return self.billions * 2e9

    @property
    def kv_bytes_per_token(self) -> float:
        return 2.0 * self.layers * self.kv_heads * self.head_dim * 2


QWEN3_8B = ModelShape("8b", 8.2, 32, 4096, 8)
QWEN3_14B = ModelShape("14b", 14.8, 48, 5120, 8)
QWEN3_32B = ModelShape("32b", 32.8, 64, 5120, 8)
MODELS = {model.name: model for model in (QWEN3_8B, QWEN3_14B, QWEN3_32B)}


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device, with the shares of its peak that engines and trainers reach."""

    name: str
    tflops: float
    hbm_gb: float
    hbm_tb_per_s: float
    prefill_share: float = 0.5
    bandwidth_share: float = 0.75
    train_share: float = 0.4

    def __post_init__(self) -> None:
        for field in ("prefill_share", "bandwidth_share", "train_share"):
            if not 0 < getattr(self, field) <= 1:
                raise ConfigError.of(
                    f"{self.name}: {field}", getattr(self, field), "must be in (0, 1]"
                )


H100 = Accelerator("H100", 989.0, 80.0, 3.35)
H800 = Accelerator("H800", 989.0, 80.0, 3.35)


@dataclass(frozen=True, slots=True)
class EngineCost:
    """A model on `devices` accelerators with tensor parallelism: two all-reduces per layer if there
    are several. `step_overhead_s` is the launch cost of a decode step.
    """

    model: ModelShape
    accelerator: Accelerator
    devices: int
    step_overhead_s: float = 0.002
    all_reduce_s: float = 12e-6
    memory_share: float = 0.88

    @property
    def weight_bytes(self) -> float:
        """What an instance pulls."""
        return self.model.weight_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV cache beside the weights."""
        room = self.devices * self.accelerator.hbm_gb * 1e9 * self.memory_share
        return int((room - self.model.weight_bytes) / self.model.kv_bytes_per_token)

    @property
    def _bytes_per_s(self) -> float:
        acc = self.accelerator
        return self.devices * acc.hbm_tb_per_s * 1e12 * acc.bandwidth_share

    @property
    def flops(self) -> float:
        return self.devices * self.accelerator.tflops * 1e12 * self.accelerator.prefill_share

    @property
    def context_s(self) -> float:
        """What one more token of context adds to a decode step."""
        return self.model.kv_bytes_per_token / self._bytes_per_s

    def step_s(self, batch: int) -> float:
        """A decode step of `batch` turns, without the reading of their context."""
        reduces = 2 * self.model.layers * self.all_reduce_s if self.devices > 1 else 0.0
        weights = self.model.weight_bytes / self._bytes_per_s
        compute = 2e9 * self.model.billions * batch / self.flops
        return self.step_overhead_s + reduces + max(weights, compute)

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """Prefill of `tokens` that end a context of `context_tokens`."""
        dense = 2e9 * self.model.billions * tokens
        mean_context = context_tokens - tokens / 2
        attention = 4.0 * self.model.layers * self.model.hidden * tokens * mean_context
        return (dense + attention) / self.flops + self.step_overhead_s


def step_cost_of(engine: EngineCost) -> StepCost:
    """An engine's cost as the arbiter's profile has it."""
    pair_flops = 4.0 * engine.model.layers * engine.model.hidden
    seconds = tuple(engine.step_s(rows) for rows in _SIZES)
    return StepCost.of(_SIZES, seconds, engine.context_s, pair_flops / engine.flops)


@dataclass(frozen=True, slots=True)
class SharedDevice:
    """A serving engine and a rollout engine on the same accelerators. A loan copies the rollout's
    weights at `load_gb_per_s`; the other memory is KV cache for both. `noise` is the spread of
    steps.
    """

    serving: EngineCost
    rollout: EngineCost
    load_gb_per_s: float = 50.0
    start_s: float = 0.3
    noise: float = 0.03

    @property
    def activation_s(self) -> float:
        """From the lender's word to the first rollout step."""
        return self.start_s + self.rollout.weight_bytes / 1e9 / self.load_gb_per_s

    @property
    def kv_bytes(self) -> int:
        """KV memory of both models together, and of the rollout's weights while it is lent."""
        whole = self.serving.devices * self.serving.accelerator.hbm_gb * 1e9
        return int(whole * self.serving.memory_share - self.serving.weight_bytes)
