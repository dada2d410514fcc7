"""An engine's costs as they were measured on a real one."""

from bisect import bisect_left
from dataclasses import dataclass

from slackwater.model.errors import ConfigError

_LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Decode steps by batch size (straight lines between the sizes measured), and cost per token.

    `steps` are `(batch, seconds)`, without what reading the context adds: `context_s` for each of
    its tokens.
    """

    steps: tuple[tuple[int, float], ...]
    context_s: float
    prefill_token_s: float
    kv_tokens: int
    weight_bytes: float = 0.0

    def __post_init__(self) -> None:
        sizes = [batch for batch, _ in self.steps]
        if len(sizes) < 2 or sizes != sorted(set(sizes)):
            raise ConfigError.of("measured steps", sizes, "must be two or more growing batch sizes")

    def step_s(self, batch: int) -> float:
        """Between the two nearest sizes, or beyond the last two."""
        sizes = [size for size, _ in self.steps]
        place = min(max(bisect_left(sizes, batch), 1), len(sizes) - 1)
        (low, low_s), (high, high_s) = self.steps[place - 1], self.steps[place]
        return max(low_s + (batch - low) * (high_s - low_s) / (high - low), 0.0)

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """By the tokens alone: short contexts, and prompts that share their steps. Never nothing:
        time must pass.
        """
        del context_tokens
        return max(self.prefill_token_s * tokens, _LEAST_S)
