"""Job files: a recipe or command, the model it trains, and the terms of sharing."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from slackwater.model.config import flatten
from slackwater.model.device import layout_devices
from slackwater.model.errors import ConfigError
from slackwater.model.job import JobProfile, JobTerms, SloScope

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = ("SLACKWATER_", "TINKER_")


@dataclass(frozen=True, slots=True)
class KnownProfile:
    """A known profile of one iteration alone; sizes are per node in host memory."""

    rollout_s: float
    train_s: float
    sync_s: float = 0.0
    rollout_nodes: int = 1
    train_nodes: int = 1
    rollout_state_gb: float = 0.0
    train_state_gb: float = 0.0
    model_billions: float = 0.001

    def __post_init__(self) -> None:
        _ = self.made

    @property
    def made(self) -> JobProfile:
        return JobProfile(**asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnJob:
    """A job whose driver its owner runs: the service only has its terms. Its layouts, such as
    tp=2, decide how many devices it needs; without them it needs whole nodes.
    """

    name: str
    iterations: int
    slo: float = 2.0
    priority: int = 0
    duty_ratio: float | None = None
    profile: KnownProfile | None = None
    slo_scope: SloScope = "job"
    rollout_layout: str = ""
    train_layout: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            fix = "must be 1-64 letters, digits, . _ -, and begin with a letter or digit"
            raise ConfigError.of("name", self.name, fix)
        _ = self.terms

    @property
    def terms(self) -> JobTerms:
        known: dict[str, Any] = {} if self.profile is None else asdict(self.profile)
        for length in ("rollout_s", "train_s", "sync_s"):
            known.pop(length, None)
        known |= self._devices
        try:
            return JobTerms(
                self.iterations,
                self.slo,
                self.priority,
                self.duty_ratio,
                slo_scope=self.slo_scope,
                **known,
            )
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix("job: ")) from None

    @property
    def known_profile(self) -> JobProfile | None:
        return None if self.profile is None else replace(self.profile.made, **self._devices)

    @property
    def _devices(self) -> dict[str, int]:
        return {
            f"{phase}_devices": layout_devices(layout, f"{phase}_layout")
            for phase, layout in (("rollout", self.rollout_layout), ("train", self.train_layout))
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile(OwnJob):
    """One job. Its driver is `recipe` with `options` (as `train RECIPE --set` takes them), or
    `command`. `env` are variables of the driver, which runs in `workdir`. A known `profile` saves
    the iterations in which the job would be profiled alone.
    """

    model: str
    recipe: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None

    def __post_init__(self) -> None:
        OwnJob.__post_init__(self)
        if (self.recipe is None) == (not self.command):
            given = "both are given" if self.command else "missing"
            raise ConfigError(f"recipe, command: {given}; give one of them")
        if self.command and self.options:
            raise ConfigError.of(
                "options", dict(self.options), "are a recipe's; put them in command"
            )
        for name, value in self.env.items():
            if not _VARIABLE.fullmatch(name) or name.startswith(_RESERVED):
                fix = "must be the name of a variable that the service does not set itself"
                raise ConfigError.of("env", name, fix)
            if "\0" in value:
                raise ConfigError(f"env.{name}: must not have a zero byte")
        if any("\0" in word for word in self.command):
            raise ConfigError.of("command", list(self.command), "must not have a zero byte")

    def assignments(self) -> list[str]:
        """The recipe's settings as `--set` takes them: the options and the rest of this file."""
        own = {"model": {"base": self.model}, "grpo": {"steps": self.iterations}}
        settings = {**flatten(own), "grpo.checkpoint_every": 1, **flatten(self.options)}
        return [f"{path}={json.dumps(value)}" for path, value in settings.items()]
