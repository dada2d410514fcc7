"""A run's configuration, and the shipped recipes."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from slackwater.model.config import decode, override
from slackwater.model.errors import ConfigError
from slackwater.model.toml_text import read_toml
from slackwater.rl.environments import AnyEnvironment
from slackwater.rl.environments.data_tasks import DataTasks

_SHIPPED = files("slackwater.rl") / "recipes"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A base model of the service by name; rank 0 trains all of it, otherwise an adapter.

    `text` sends observations as plain text or as chat turns.
    """

    base: str = "tiny"
    lora_rank: int = 0
    seed: int = 0
    text: Literal["plain", "chat"] = "plain"


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How answers are drawn."""

    max_tokens: int = 8
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class WarmUpSettings:
    """Supervised steps on demonstrations, when a random model would find no valid answer."""

    steps: int = 0
    batch: int = 64
    learning_rate: float = 1e-3


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """GRPO with PPO clipping, a higher upper clip and dynamic sampling (DAPO 3.1, 3.2).

    A step draws prompts until `groups` of them have differing rewards, or `max_groups` were drawn;
    with `dynamic_sampling` off it draws `groups`. Of each group the `train_on` answers with the
    largest reward variance are trained on (PODS; 0: all), since sampling is cheaper than training.
    `updates` optimizer steps share a step's groups. The run ends early once the mean reward of ten
    steps exceeds `stop_at_reward`.

    With `overlap` above 0 training starts on complete groups in micro-batches of at least `overlap`
    trajectories while the rest still roll out (RLBoost 4.1). The weights change once at the end, so
    the step stays on-policy; tokens are normalized by the previous step's number, since this one's
    is not known yet. With `in_order` a group waits for those of earlier prompts, so that the same
    run sums the same gradients whichever group ends first, bit for bit.

    `kl` above 0 penalizes each token by how far the policy is from the reference model: the base
    model, or the saved weights that `reference` names.
    """

    steps: int = 100
    groups: int = 16
    group_size: int = 8
    train_on: int = 0
    learning_rate: float = 1e-3
    grad_clip_norm: float = 1.0
    updates: int = 1
    clip_low: float = 0.8
    clip_high: float = 1.28
    loss: Literal["ppo", "importance_sampling", "cispo"] = "ppo"
    by_spread: bool = True
    dynamic_sampling: bool = True
    max_groups: int = 32
    entropy_bonus: float = 0.0
    kl: float = 0.0
    reference: str = ""
    stop_at_reward: float | None = None
    checkpoint_every: int = 20
    overlap: int = 0
    in_order: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "groups", "updates", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError.of(f"grpo.{name}", getattr(self, name), "must be at least 1")
        if self.overlap < 0 or (self.overlap and self.updates > 1):
            fix = "must be 0, or above 0 with grpo.updates = 1"
            raise ConfigError.of("grpo.overlap", self.overlap, fix)
        if self.group_size < 2:
            raise ConfigError.of("grpo.group_size", self.group_size, "must be at least 2")
        if self.kl < 0:
            raise ConfigError.of("grpo.kl", self.kl, "must be at least 0")
        if self.train_on and not 2 <= self.train_on <= self.group_size:
            fix = f"must be 0 (all), or from 2 to grpo.group_size ({self.group_size})"
            raise ConfigError.of("grpo.train_on", self.train_on, fix)
        if self.dynamic_sampling and self.max_groups < self.groups:
            raise ConfigError.of("grpo.max_groups", self.max_groups, "must be at least grpo.groups")


@dataclass(frozen=True, slots=True)
class SupervisedSettings:
    """Supervised (`sft`) and preference (`dpo`) training on a data set. `beta` weighs preferences
    against the distance to the reference model: the base model, or the saved weights `reference`.
    """

    steps: int = 100
    batch: int = 8
    learning_rate: float = 1e-4
    grad_clip_norm: float = 1.0
    beta: float = 0.1
    reference: str = ""
    checkpoint_every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError.of(name, getattr(self, name), "must be at least 1")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything a run depends on but the service's address."""

    environment: AnyEnvironment
    method: Literal["grpo", "sft", "dpo"] = "grpo"
    model: ModelSettings = field(default_factory=ModelSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    warm_up: WarmUpSettings = field(default_factory=WarmUpSettings)
    grpo: GrpoSettings = field(default_factory=GrpoSettings)
    supervised: SupervisedSettings = field(default_factory=SupervisedSettings)

    def __post_init__(self) -> None:
        if self.method != "grpo" and not isinstance(self.environment, DataTasks):
            fix = f'must be "data" for method = "{self.method}"'
            raise ConfigError.of("environment.kind", self.environment.kind, fix)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.grpo.steps if self.method == "grpo" else self.supervised.steps

    @property
    def curve(self) -> str:
        """The metric that shows progress."""
        return "reward" if self.method == "grpo" else "loss"


def load_recipe(name: str, assignments: Sequence[str] = ()) -> Recipe:
    """A recipe of the package by name, or of a TOML file, with `a.b=c` assignments over it."""
    return decode(Recipe, override(_table(name), assignments))


def recipe_names() -> list[str]:
    return sorted(item.name[:-5] for item in _SHIPPED.iterdir() if item.name.endswith(".toml"))


def recipe_description(name: str) -> str:
    """A shipped recipe's first comment line."""
    return (_SHIPPED / f"{name}.toml").read_text().partition("\n")[0].removeprefix("#").strip()


def _table(name: str) -> dict[str, Any]:
    path = Path(name)
    if path.suffix == ".toml":
        return read_toml("RECIPE", path)
    if name not in recipe_names():
        known = ", ".join(recipe_names())
        raise ConfigError.of("RECIPE", name, f"must be a .toml file or one of {known}")
    return tomllib.loads((_SHIPPED / f"{name}.toml").read_text())
