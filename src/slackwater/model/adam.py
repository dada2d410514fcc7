"""AdamW's settings in the log, on the wire and in the trainer."""

import math
from dataclasses import dataclass, fields

from slackwater.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Adam:
    """One AdamW step; `grad_clip_norm` 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError.of(
                    f"adam_params.{item.name}", value, "must be finite and at least 0"
                )
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ConfigError.of(f"adam_params.{name}", getattr(self, name), "must be below 1")
