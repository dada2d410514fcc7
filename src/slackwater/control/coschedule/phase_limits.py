"""How long a phase may take, and its holder be silent."""

from dataclasses import dataclass

from slackwater.model.errors import ConfigError
from slackwater.model.placement import Phase


@dataclass(frozen=True, slots=True)
class PhaseLimits:
    """When a phase is given up, and how a job is profiled.

    A holder whose own code asks must be heard every `lease_s`. A phase may take `factor` times what
    is known of it, and `least_s` in any case; while nothing is known, `unknown_s`. Of a client
    whose phases are inferred it is the time in which none of its turns and operations ends that is
    so bounded. One that goes on for `share_after` times what is known of it (`least_s` in any case;
    while nothing is known, `unknown_s`) lets others in: a rollout if they wait, and training after
    each step, where they wait without regard to `least_s`. A job that asks for nothing within
    `rest_s`, after a phase or in the middle of one, keeps nobody waiting for its turn, and one that
    does not for `yield_s` nobody for a place. After `strikes` phases that were given up the job has
    failed. A program that says that it lives, and then does not for `lease_s`, keeps nobody from a
    place either. A job without driver and session has stopped when nothing was heard of it for
    `gone_s`.
    """

    lease_s: float = 60.0
    factor: float = 20.0
    share_after: float = 5.0
    least_s: float = 60.0
    unknown_s: float = 600.0
    rest_s: float = 2.0
    yield_s: float = 300.0
    gone_s: float = 600.0
    strikes: int = 3
    cycles: int = 2
    kept_share: float = 0.25

    def __post_init__(self) -> None:
        for name in (
            *("lease_s", "factor", "share_after", "rest_s", "yield_s", "gone_s"),
            *("least_s", "unknown_s", "strikes", "cycles"),
        ):
            if getattr(self, name) <= 0:
                raise ConfigError.of(f"limits: {name}", getattr(self, name), "must be above 0")

    def why_given_up(
        self, phase: Phase, held_s: float, known_s: float | None, silent_s: float
    ) -> str | None:
        """Why a phase of a job's own code, held so long and not heard of for so long, loses its
        permit; None while it may go on.
        """
        if silent_s > self.lease_s:
            return f"its {phase} phase was not heard of for {silent_s:.0f} s"
        limit_s = self._most_s(known_s)
        return f"its {phase} phase did not end within {limit_s:.0f} s" if held_s > limit_s else None

    def why_stuck(self, phase: Phase, silent_s: float, known_s: float | None) -> str | None:
        """The same of an inferred phase in which nothing has ended for so long."""
        limit_s = self._most_s(known_s)
        if silent_s <= limit_s:
            return None
        return f"nothing of its {phase} phase ended within {limit_s:.0f} s"

    def lets_others_in_after_s(self, known_s: float | None) -> float:
        """How long an inferred phase may go on until it does."""
        return self.unknown_s if known_s is None else max(self.share_after * known_s, self.least_s)

    def _most_s(self, known_s: float | None) -> float:
        return self.unknown_s if known_s is None else max(self.factor * known_s, self.least_s)
