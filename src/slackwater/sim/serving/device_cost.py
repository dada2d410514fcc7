"""The costs of two models on one serving device, from hardware rates and shapes."""

from dataclasses import dataclass

from slackwater.policy.serving.step_cost import StepCost
from slackwater.sim.rollout.engine_cost import EngineCost

_SIZES = (1, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 16_384)


def step_cost_of(engine: EngineCost) -> StepCost:
    """An engine's cost as the arbiter's profile has it."""
    flops = engine.devices * engine.accelerator.tflops * 1e12 * engine.accelerator.prefill_share
    pair_flops = 4.0 * engine.model.layers * engine.model.hidden
    seconds = tuple(engine.step_s(rows) for rows in _SIZES)
    return StepCost.of(_SIZES, seconds, engine.context_s, pair_flops / flops)


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
