"""How long pages of a rollout's finished turns stay for the next turn (ROSE 4.1 and appendix C)."""

from dataclasses import dataclass

from slackwater.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PrefixLease:
    """A prefix that nobody used for `seconds` goes; 0 keeps none."""

    seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ConfigError.of("prefix lease", self.seconds, "must not be negative")

    def expired_before(self, now_s: float) -> float:
        """Prefixes last used before this moment may go now; younger ones only under pressure."""
        return now_s - self.seconds
