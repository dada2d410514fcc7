"""How long a phase may take, and its holder be silent."""

from dataclasses import dataclass

from slackwater.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PhaseLimits:
    """When a phase is given up, and how a job is profiled.

    A holder whose own code asks must be heard every `lease_s`. A phase may take `factor` times what is known of it, and
    `least_s` in any case; while nothing is known, `unknown_s`. A job
    that asks for nothing within `rest_s` after a phase keeps nobody waiting. After `strikes` phases that were given up the job has failed.
    """

    lease_s: float = 60.0
    factor: float = 20.0
    least_s: float = 60.0
    unknown_s: float = 600.0
    rest_s: float = 2.0
    strikes: int = 3
    cycles: int = 2
    kept_share: float = 0.25

    def __post_init__(self) -> None:
        for name in ("lease_s", "factor", "rest_s", "least_s", "unknown_s", "strikes", "cycles"):
            if getattr(self, name) <= 0:
                raise ConfigError.of(f"limits: {name}", getattr(self, name), "must be above 0")
