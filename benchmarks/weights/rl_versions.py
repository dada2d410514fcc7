"""Consecutive versions of a real run: how much of them changes, and how small the deltas are.

The run is the GRPO step of `bench grpo` (engine samples, trainer learns, in fp32); each version is
its weights in bf16, as an engine on an accelerator would take them. How many elements change
depends on the learning rate over the spacing of bf16, so two rates are run.
"""

import statistics
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from benchmarks.training.grpo_step import ADAM, GrpoStep, StepShape
from slackwater.weights.delta.encode import Elements, encode

_WARM_UP = 4


def rl_versions(steps: int, seed: int) -> dict[str, object]:
    """Medians over `steps` consecutive pairs of versions, by learning rate."""
    torch.set_num_threads(1)
    figures: dict[str, object] = {}
    for label, rate in (("lr1e-3", 1e-3), ("lr1e-5", 1e-5), ("lr1e-6", 1e-6)):
        run = GrpoStep(StepShape(), seed, replace(ADAM, learning_rate=rate))
        versions: list[Elements] = []
        for step in range(_WARM_UP + steps):
            run.run()
            if step >= _WARM_UP - 1:
                versions.append(_bf16(run.weights()))
        shares, ratios = [], []
        for old, new in pairwise(versions):
            shares.append(float((old != new).mean()))
            ratios.append(len(encode(old, new)) / new.nbytes)
        figures[f"rl_changed_share_{label}"] = statistics.median(shares)
        figures[f"rl_over_whole_{label}"] = statistics.median(ratios)
    return figures


def _bf16(weights: dict[str, torch.Tensor]) -> Elements:
    flat = torch.cat([weights[name].reshape(-1) for name in sorted(weights)])
    return flat.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
