"""Measures running jobs: the profile of an unprofiled one, the slowdown of one that shares."""

from slackwater.control.coschedule.managed_job import ManagedJob
from slackwater.control.coschedule.phase_limits import PhaseLimits
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.model.job import JobProfile
from slackwater.model.placement import Phase


class PhaseProfiler:
    """Measures; the phase controller executes."""

    def __init__(self, scheduler: CoScheduler, limits: PhaseLimits) -> None:
        self._scheduler = scheduler
        self._limits = limits

    def profile(self, job: ManagedJob) -> JobProfile | None:
        """The profile of an unprofiled job, from its longest warm cycle; None while too few cycles
        were observed, or when it has no iteration left.
        """
        trains = job.observed_s.get(Phase.TRAIN, [])
        if not self._scheduler.is_unprofiled(job.id) or len(trains) < self._limits.cycles:
            return None
        if job.iteration >= job.terms.iterations:
            return None
        first = 1 if self._limits.cycles > 1 else 0  # the first cycle starts everything: not warm
        job.trains_only = Phase.ROLLOUT not in job.observed_s  # then each step is an iteration
        rollouts = job.observed_s.get(Phase.ROLLOUT, trains)
        syncs = job.observed_s.get(Phase.SYNC, [0.0])
        return job.terms.profile(max(rollouts[first:] or rollouts), max(trains[first:]), min(syncs))

    def must_preempt(self, job: ManagedJob, *, at_boundary: bool) -> bool:
        """Whether its phase is preempted here: open work resumes with its next permit."""
        if job.requests_permits or job.permit is None or job.is_phase_over():
            return False
        return self._scheduler.must_yield(job.id, at_boundary=at_boundary)

    def slowdown(self, job: ManagedJob, now_s: float) -> float | None:
        """Its time on its SLO clock so far, over what its phases and its own time between them took
        of that; None before the clock runs.
        """
        state = self._scheduler.find(job.id)
        if state is None:
            return None
        alone_s = state.observed_s
        if job.permit is not None:
            alone_s += now_s - job.permit.started_s
        elif job.is_idle and state.joined:
            alone_s += now_s - state.free_s
        return max(state.clock_time_s(now_s) / alone_s, 1.0) if alone_s > 0 else None
