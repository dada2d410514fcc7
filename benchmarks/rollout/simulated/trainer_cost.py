"""What training takes."""

from dataclasses import dataclass

from slackwater.sim.rollout.engine_cost import Accelerator, ModelShape


@dataclass(frozen=True, slots=True)
class TrainerCost:
    """Training on `devices` accelerators. `passes` counts forward passes per token: forward,
    backward (2), recomputation (1), and the old and reference log-probs (2) make 6.
    """

    model: ModelShape
    accelerator: Accelerator
    devices: int
    passes: float = 6.0
    microbatch_overhead_s: float = 0.5
    optimizer_s: float = 4.0
    switch_s: float = 4.0

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second."""
        acc = self.accelerator
        flops = self.devices * acc.tflops * 1e12 * acc.train_share
        return flops / (2e9 * self.model.billions * self.passes)
