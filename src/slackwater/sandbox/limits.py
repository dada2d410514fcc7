"""What one action may use at most."""

from dataclasses import dataclass

from slackwater.model.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Past any of these the action is ended, with everything that it started.

    `disk_bytes` is of the whole environment, and looked at every `Supervisor.LOOK_EVERY_S`; no single file
    grows beyond it at all. `network` grants the host's network; without it there is a loopback of its own.
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
