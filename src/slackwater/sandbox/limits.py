"""What one action, and one copy of an environment, may use at most."""

from dataclasses import dataclass

from slackwater.model.errors import ConfigError

MOST = 1 << 62  # what the kernel takes as a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Past any of these the action is ended, with everything that it started.

    `disk_bytes` is of the whole environment with the deleted files that its processes still have,
    and measured every `supervisor.LOOK_EVERY_S`; no single file grows beyond it at all. `network`
    grants the addresses that the operator allows, through a proxy; without it there is only a
    loopback.
    """

    wall_s: float = 60.0
    output_bytes: int = 1 << 20
    memory_bytes: int = 2 << 30
    processes: int = 256
    disk_bytes: int = 1 << 30
    network: bool = False

    def __post_init__(self) -> None:
        for name in ("wall_s", "output_bytes", "memory_bytes", "processes", "disk_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError.of(f"limits.{name}", getattr(self, name), "must be above 0")
            if getattr(self, name) > MOST:
                raise ConfigError.of(f"limits.{name}", getattr(self, name), f"must be up to {MOST}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    """How much a snapshot, or an environment that begins as a copy of one, may have.

    `disk_bytes` are blocks on disk, `apparent_bytes` what the files would have without holes.
    """

    names: int = 500_000
    disk_bytes: int = 16 << 30
    apparent_bytes: int = 256 << 30
