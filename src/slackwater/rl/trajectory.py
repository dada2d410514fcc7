"""A trajectory: one sample's whole interaction, as the tokens it will be trained on."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tinker

from slackwater.rl.advantages import Floats


@dataclass(slots=True)
class Trajectory:
    """All turns in one token sequence; `sampled` marks the model's own, with log-probs."""

    tokens: list[int]
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0

    def __post_init__(self) -> None:
        self._mark(len(self.tokens), False)

    def observe(self, tokens: list[int]) -> None:
        """Append what the environment said."""
        self.tokens.extend(tokens)
        self._mark(len(tokens), False)

    def act(self, tokens: list[int], logprobs: list[float]) -> None:
        """Append what the model said."""
        self.tokens.extend(tokens)
        self.sampled.extend([True] * len(tokens))
        self.logprobs.extend(logprobs)
        self.turns += 1

    def _mark(self, count: int, sampled: bool) -> None:
        self.sampled.extend([sampled] * count)
        self.logprobs.extend([0.0] * count)

    @property
    def sampled_logprobs(self) -> Floats:
        """Log-probs of the sampled tokens only."""
        kept: Floats = np.asarray(self.logprobs, np.float32)[np.asarray(self.sampled)]
        return kept

    def policy_datum(self, advantages: Floats) -> tinker.Datum:
        """For a policy loss: `advantages` of the sampled tokens, nothing elsewhere."""
        mask = np.asarray(self.sampled)
        pushes = np.zeros(len(self.tokens), np.float32)
        pushes[mask] = advantages
        return self._datum(
            logprobs=np.asarray(self.logprobs, np.float32)[1:], advantages=pushes[1:]
        )

    def supervised_datum(self, weight: float) -> tinker.Datum:
        """For cross-entropy: the answers, each token with this weight."""
        return self._datum(weights=np.asarray(self.sampled[1:], np.float32) * weight)

    def _datum(self, **inputs: Floats) -> tinker.Datum:
        targets = np.asarray(self.tokens[1:], np.int64)
        arrays: dict[str, npt.NDArray[Any]] = {"target_tokens": targets, **inputs}
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={
                name: tinker.TensorData.from_numpy(array) for name, array in arrays.items()
            },
        )
