"""What a pass is given and what it answers.

Everything of a datum is aligned to `tokens`: position i predicts `target_tokens[i]` (the caller has
shifted already), and `weights`, `logprobs` and `advantages` belong to that prediction.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence and the inputs of its loss: `target_tokens` int64, the others float32."""

    tokens: npt.NDArray[np.int64]
    inputs: Mapping[str, npt.NDArray[np.generic]]

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])


@dataclass(frozen=True, slots=True)
class PassOutput:
    """Log-probs of each datum's targets, in the order and shape given, and `name:reduction`
    metrics.
    """

    logprobs: tuple[npt.NDArray[np.float32], ...]
    metrics: Mapping[str, float]
