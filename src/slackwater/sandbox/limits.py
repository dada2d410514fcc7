"""Limits of an action and of a copy of an environment."""

import resource
from dataclasses import dataclass

from slackwater.model.errors import ConfigError, check_above_zero

MAX_VALUE = 1 << 62  # the largest number that the kernel accepts for a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Exceeding any of these ends the action with everything that it started.

    `disk_bytes` covers the whole environment including deleted open files, measured every
    `supervisor.CHECK_EVERY_S`; no single file exceeds it at all. `network` grants the operator's
    allowed addresses through a proxy; without it there is only a loopback.
    """

    wall_s: float = 60.0
    output_bytes: int = 1 << 20
    memory_bytes: int = 2 << 30
    processes: int = 256
    disk_bytes: int = 1 << 30
    network: bool = False

    def rlimits(self) -> dict[int, int]:
        """What the kernel enforces for each process of the action."""
        return {resource.RLIMIT_FSIZE: self.disk_bytes, resource.RLIMIT_CORE: 0}

    def __post_init__(self) -> None:
        names = ("wall_s", "output_bytes", "memory_bytes", "processes", "disk_bytes")
        check_above_zero("limits.", self, *names)
        for name in names:
            if getattr(self, name) > MAX_VALUE:
                raise ConfigError.of(
                    f"limits.{name}", getattr(self, name), f"must be up to {MAX_VALUE}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    """Limits of a snapshot or a copy: blocks on disk, and `apparent_bytes` including holes."""

    names: int = 500_000
    disk_bytes: int = 16 << 30
    apparent_bytes: int = 256 << 30
