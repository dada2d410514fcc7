"""Limits of an engine: memory, rows per step, versions."""

from dataclasses import dataclass

from slackwater.model.errors import ConfigError, check_above_zero, check_not_negative


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`kv_bytes` bounds the cache's physical pages; the rest bounds work per step and versions.

    `batch_invariant` makes a row's result independent of the other rows of its batch and of how its
    keys got into the cache, so that a request continues identically on another engine. `None` is
    the device's default: on for CPUs, off for CUDA.

    `steps_ahead`: on CUDA, a decode step is queued before the previous step's tokens are read, if
    no other work can come between. Turn it off for an engine that shares its device.
    """

    kv_bytes: int = 1 << 30
    page_bytes: int = 2 << 20
    max_running: int = 256
    max_step_tokens: int = 512
    max_context: int | None = None
    prefix_cache: bool = True
    batch_invariant: bool | None = None
    max_full_versions: int = 3
    max_adapters: int = 64
    base_version: str = "base"
    steps_ahead: bool = True

    def __post_init__(self) -> None:
        positive = ("kv_bytes", "page_bytes", "max_running", "max_step_tokens", "max_full_versions")
        check_above_zero("", self, *positive)
        check_not_negative("", self, "max_adapters")
        if self.page_bytes % 4096:
            raise ConfigError.of("page_bytes", self.page_bytes, "must be a multiple of 4096")
        if self.max_context is not None and self.max_context < 2:
            raise ConfigError.of("max_context", self.max_context, "must be at least 2")
