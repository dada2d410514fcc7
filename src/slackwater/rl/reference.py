"""Log-probs of a reference model, to keep a policy near it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker

from slackwater.rl.advantages import Floats
from slackwater.rl.rollout import Trajectory


class ReferenceModel:
    """Fixed weights that score trajectories: the base model, or saved weights by their path."""

    def __init__(self, service: tinker.ServiceClient, base: str, path: str = "") -> None:
        self._sampler: Any = (
            service.create_sampling_client(model_path=path)
            if path
            else service.create_sampling_client(base_model=base)
        )

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """Of every sampled token of each trajectory; the requests are sent together."""
        asked = [
            self._sampler.compute_logprobs(tinker.ModelInput.from_ints(list(trajectory.tokens)))
            for trajectory in trajectories
        ]
        scores = [np.asarray(future.result()[1:], np.float32) for future in asked]
        return [
            row[np.asarray(trajectory.sampled[1:])]
            for row, trajectory in zip(scores, trajectories, strict=True)
        ]


def kl_estimate(policy: Sequence[Floats], reference: Sequence[Floats]) -> float:
    """KL of the policy to the reference over its own tokens, never below 0: E[r - 1 - log r]."""
    gaps = np.concatenate(list(reference)) - np.concatenate(list(policy))
    return float(np.mean(np.expm1(gaps) - gaps)) if gaps.size else 0.0
