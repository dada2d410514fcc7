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
    """Log-probs of each datum's targets, in the order and shape given, and `name:reduction` metrics."""

    logprobs: tuple[npt.NDArray[np.float32], ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class AdamParams:
    """One AdamW step; `grad_clip_norm` 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
