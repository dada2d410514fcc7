"""What is measured of jobs as they run: the profile of one that came without, and the slowdown of
one that shares.
"""

from slackwater.control.coschedule.job_phases import JobPhases
from slackwater.control.coschedule.phase_limits import PhaseLimits
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.model.job import JobProfile
from slackwater.model.placement import Phase


class PhaseProfiler:
    """Measures; the phase keeper carries out."""

    def __init__(self, scheduler: CoScheduler, limits: PhaseLimits) -> None:
        self._scheduler = scheduler
        self._limits = limits

    def profile(self, one: JobPhases) -> JobProfile | None:
        """Of the longest warm cycle of a guest; None while too few were seen, or none is left."""
        trains = one.seen.get(Phase.TRAIN, [])
        if not self._scheduler.is_guest(one.job) or len(trains) < self._limits.cycles:
            return None
        if one.iteration >= one.terms.iterations:
            return None
        first = 1 if self._limits.cycles > 1 else 0
        one.trains_only = Phase.ROLLOUT not in one.seen  # then each step is an iteration
        rollouts = one.seen.get(Phase.ROLLOUT, trains)
        syncs = one.seen.get(Phase.SYNC, [0.0])
        return one.terms.profile(max(rollouts[first:] or rollouts), max(trains[first:]), min(syncs))

    def yields(self, one: JobPhases, *, at_boundary: bool) -> bool:
        """Whether its phase is cut here: what it has still open goes on with its next one."""
        if one.asks or one.hold is None or one.is_over():
            return False
        return self._scheduler.yields(one.job, at_boundary=at_boundary)

    def slowdown(self, one: JobPhases, now_s: float) -> float | None:
        """Its time on its SLO clock so far, over what its phases and its own time between them
        took of that.
        """
        state = self._scheduler.find(one.job)
        if state is None:
            return None
        alone_s = state.seen_s
        if one.hold is not None:
            alone_s += now_s - one.hold.since_s
        elif one.is_idle and state.joined:
            alone_s += now_s - state.free_s
        return max(state.elapsed_s(now_s) / alone_s, 1.0) if alone_s > 0 else None
