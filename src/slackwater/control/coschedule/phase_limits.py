"""How long a phase may take, and how long its holder may be silent."""

from dataclasses import dataclass, fields

from slackwater.model.errors import ConfigError
from slackwater.model.placement import Phase


@dataclass(frozen=True, slots=True)
class PhaseLimits:
    """When a job loses its permit, and how an unprofiled job is measured.

    - `lease_s`: permit heartbeat timeout of a job whose own code requests permits. A program that
      has sent heartbeats and stops also loses its place to a job that waits.
    - `factor`: a phase may take this many times its usual length, and `least_s` in any case; while
      the usual length is unknown, `unknown_s`. For inferred phases this bounds the time in which no
      turn or operation of the job ends.
    - `share_after`: an inferred phase that takes this many times its usual length (`least_s` in any
      case; `unknown_s` while the usual length is unknown) lets others in: a rollout if they wait,
      training after each step. Where they wait for training, `least_s` does not apply.
    - `rest_s`: the group of a job that asks for nothing for so long stops waiting for its turn.
    - `yield_s`: a job that asks for nothing for so long loses its place to a job that waits.
    - `gone_s`: a job with neither driver nor session has stopped after so long a silence.
    - `strikes`: a job fails after so many phases that lost their permits.
    - `cycles`: an unprofiled job is measured for so many cycles.
    - `kept_share`: the share of its instances on which a shrunk rollout finishes its last turns.
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
        for field in fields(self):
            name = field.name
            if name != "kept_share" and getattr(self, name) <= 0:
                raise ConfigError.of(f"limits: {name}", getattr(self, name), "must be above 0")

    def lease_violation(
        self, phase: Phase, held_s: float, usual_s: float | None, silent_s: float
    ) -> str | None:
        """Why a job whose own code requested the permit loses it; None while it keeps it."""
        if silent_s > self.lease_s:
            return f"its {phase} phase sent no report for {silent_s:.0f} s"
        limit_s = self._limit_s(usual_s)
        return f"its {phase} phase did not end within {limit_s:.0f} s" if held_s > limit_s else None

    def silence_violation(self, phase: Phase, silent_s: float, usual_s: float | None) -> str | None:
        """Why a job whose phase is inferred loses its permit; None while it keeps it."""
        limit_s = self._limit_s(usual_s)
        if silent_s <= limit_s:
            return None
        return f"nothing of its {phase} phase ended within {limit_s:.0f} s"

    def share_after_s(self, usual_s: float | None) -> float:
        """How long an inferred phase may take before it lets others in."""
        return self.unknown_s if usual_s is None else max(self.share_after * usual_s, self.least_s)

    def _limit_s(self, usual_s: float | None) -> float:
        return self.unknown_s if usual_s is None else max(self.factor * usual_s, self.least_s)
