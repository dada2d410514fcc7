"""The losses of a pass, each a SUM over tokens, never a mean, so that chunks of a batch add up.

`lp` is the learner's log-prob of a target, q the sampler's (`logprobs`), A the `advantages`, and r
= exp(lp - q). A loss computed by the caller arrives as `cross_entropy` with weights = -dC/dlp,
which may be negative.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from slackwater.model.errors import ConfigError

Inputs: TypeAlias = Mapping[str, Tensor]
LossConfig: TypeAlias = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Loss:
    """`value(lp, inputs, config)` is one number per target; `config` has the keys with defaults.

    `inputs` are the arrays that it needs. If `scaled_by` names one of them, the gradient is a
    multiple of it. `by_sequence` adds the input `sequence`: the index of each target's datum.
    """

    inputs: tuple[str, ...]
    scaled_by: str | None
    value: Callable[[Tensor, Inputs, LossConfig], Tensor]
    config: Mapping[str, float] = field(default_factory=dict)
    by_sequence: bool = False

    def resolve_config(self, name: str, given: LossConfig) -> dict[str, float]:
        """The defaults with the given values; unknown keys and invalid values are refused."""
        for key, number in given.items():
            if not math.isfinite(number):
                raise ConfigError.of(f"loss_fn_config.{key}", number, "must be a finite number")
            if key not in self.config:
                takes = ", ".join(self.config) or "no keys"
                fix = f"is no setting of {name}, which takes {takes}"
                raise ConfigError.of(f"loss_fn_config.{key}", number, fix)
        config = {**self.config, **given}
        if config.get("beta", 0.0) < 0:
            raise ConfigError.of("loss_fn_config.beta", config["beta"], "must not be negative")
        low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
        if low is not None and high is not None and not 0 <= low <= high:
            raise ConfigError.of(
                "loss_fn_config.clip_low_threshold",
                low,
                f"must be at least 0 and at most clip_high_threshold ({high})",
            )
        return config


def _cross_entropy(lp: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    return -lp * inputs["weights"]


def _importance_sampling(lp: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    return -_ratio(lp, inputs) * inputs["advantages"]


def _ppo(lp: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    ratio, advantages = _ratio(lp, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, config) * advantages)


def _cispo(lp: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    return -_clip(_ratio(lp, inputs), config).detach() * lp * inputs["advantages"]


def _dro(lp: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    """Direct reward optimization (Richemond et al. 2024): a quadratic penalty instead of a clip. A
    target with advantage 0 and log-prob 0 is a prompt's and has no penalty.
    """
    q, advantages = inputs["logprobs"], inputs["advantages"]
    sampled = (q != 0) | (advantages != 0)
    pull = torch.where(sampled, (lp - q).square(), torch.zeros_like(lp))
    return -(lp * advantages - 0.5 * config["beta"] * pull)


def _gspo(lp: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    """Group sequence policy optimization (Zheng et al. 2025, eq. 5-7): one clipped ratio for a
    sequence, the geometric mean over targets whose advantage is not 0. Each sequence counts once.
    """
    advantages, sequence = inputs["advantages"], inputs["sequence"]
    counted = (advantages != 0).to(lp.dtype)
    sums = lp.new_zeros(int(sequence.max()) + 1)
    sizes = sums.index_add(0, sequence, counted).clamp(min=1.0)
    mean = sums.index_add(0, sequence, (lp - inputs["logprobs"]) * counted) / sizes
    ratio = torch.exp(mean)[sequence]
    value = torch.minimum(ratio * advantages, _clip(ratio, config) * advantages)
    return -value / sizes[sequence]


def _ratio(lp: Tensor, inputs: Inputs) -> Tensor:
    return torch.exp(lp - inputs["logprobs"])


def _clip(ratio: Tensor, config: LossConfig) -> Tensor:
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


def _thresholds(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(("weights",), "weights", _cross_entropy),
    "importance_sampling": Loss(("logprobs", "advantages"), "advantages", _importance_sampling),
    "ppo": Loss(("logprobs", "advantages"), "advantages", _ppo, _thresholds(0.8, 1.2)),
    "cispo": Loss(("logprobs", "advantages"), "advantages", _cispo, _thresholds(0.0, 4.0)),
    "dro": Loss(("logprobs", "advantages"), None, _dro, {"beta": 0.05}),
    "gspo": Loss(
        ("logprobs", "advantages"),
        "advantages",
        _gspo,
        _thresholds(1 - 3e-4, 1 + 4e-4),
        by_sequence=True,
    ),
}


def find_loss(name: str) -> Loss:
    """The loss of that name, or an error that lists the known ones."""
    if name not in LOSSES:
        raise ConfigError.of(
            "loss_fn", name, f"is not implemented; write one of {', '.join(LOSSES)}"
        )
    return LOSSES[name]
