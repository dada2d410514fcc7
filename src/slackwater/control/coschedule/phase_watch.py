"""What to do about a job that makes no progress, runs far beyond its usual length, or does nothing.

The answer depends on how long that has lasted and on whether other jobs wait.
"""

from dataclasses import dataclass, fields
from enum import Enum, auto

from slackwater.control.coschedule.managed_job import ManagedJob
from slackwater.control.coschedule.scheduler import CoScheduler
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
        if not 0 <= self.kept_share <= 1:
            raise ConfigError.of("limits: kept_share", self.kept_share, "must be from 0 to 1")

    def longest_s(self, factor: float, usual_s: float | None) -> float:
        """So many times the usual length, `least_s` in any case, or `unknown_s`."""
        return self.unknown_s if usual_s is None else max(factor * usual_s, self.least_s)


class IdleAction(Enum):
    """What to do about a job that asks for nothing."""

    CHECK_LATER = auto()  # it has not been idle for long, or nobody waits for it
    END_PHASE = auto()  # others wait for nodes that it does not use
    REST = auto()  # its group stops waiting for its turn
    EVICT = auto()  # others wait for a place


class PhaseWatch:
    """Decides; the phase controller executes."""

    def __init__(self, scheduler: CoScheduler, limits: PhaseLimits) -> None:
        self._scheduler = scheduler
        self._limits = limits

    def violation(self, job: ManagedJob, now_s: float) -> str | None:
        """Why a job loses its permit; None while it keeps it."""
        permit, limits = job.permit, self._limits
        if permit is None:
            return None
        phase, silent_s = f"its {permit.phase} phase", now_s - permit.active_s
        limit_s = limits.longest_s(limits.factor, self._usual_s(job, permit.phase))
        if not job.requests_permits:
            slow = silent_s > limit_s
            return f"nothing of {phase} ended within {limit_s:.0f} s" if slow else None
        if silent_s > limits.lease_s:
            return f"{phase} sent no report for {silent_s:.0f} s"
        slow = now_s - permit.started_s > limit_s
        return f"{phase} did not end within {limit_s:.0f} s" if slow else None

    def is_overlong(self, job: ManagedJob, phase: Phase, now_s: float) -> bool:
        """Whether an inferred phase of this kind takes much longer than is usual for the job.

        `least_s` is no lower bound for training that another job waits for.
        """
        if job.permit is None or job.requests_permits or job.permit.phase is not phase:
            return False
        usual_s = self._usual_s(job, phase)
        most_s = self._limits.longest_s(self._limits.share_after, usual_s)
        if usual_s is not None and phase is Phase.TRAIN and self.has_waiters(job):
            most_s = self._limits.share_after * usual_s
        return job.preempted_s + now_s - job.permit.started_s >= most_s

    def must_yield_rollout(self, job: ManagedJob, now_s: float) -> bool:
        """Whether its rollout is overlong while another job waits for the nodes."""
        return self.is_overlong(job, Phase.ROLLOUT, now_s) and self.has_waiters(job)

    def has_waiters(self, job: ManagedJob) -> bool:
        """Whether another job waits for the nodes that it holds, or for its turn after this one."""
        return job.permit is not None and self._scheduler.has_waiters(job.id, job.permit.nodes)

    def may_continue_training(self, job: ManagedJob) -> bool:
        """Whether a job that only trains may begin its next step in the same phase: nobody waits
        for it, and else it would wait for the nodes of a rollout that it does not make.
        """
        return self._scheduler.is_rollout_blocked(job.id) and not self.has_waiters(job)

    def idle_action(self, job: ManagedJob, now_s: float) -> IdleAction | None:
        """None if the job has something to do."""
        if job.is_permit_unused:
            assert job.permit is not None
            rested = now_s - job.permit.active_s >= self._limits.rest_s - 1e-6
            ends = rested and self.has_waiters(job)
            return IdleAction.END_PHASE if ends else IdleAction.CHECK_LATER
        if not job.is_idle or not job.epoch:
            return None
        idle_s = now_s - job.idle_since_s
        silent = job.heartbeat_s is not None and now_s - job.heartbeat_s > self._limits.lease_s
        if self._scheduler.has_held_jobs and (silent or idle_s >= self._limits.yield_s):
            return IdleAction.EVICT
        rested = idle_s >= self._limits.rest_s - 1e-6
        return IdleAction.REST if rested else IdleAction.CHECK_LATER

    def _usual_s(self, job: ManagedJob, phase: Phase) -> float | None:
        """The length of the phase by the job's profile; None while it has none."""
        state = self._scheduler.find(job.id)
        if state is None or state.placement is None:
            return None
        return state.profile.rollout_s if phase is Phase.ROLLOUT else state.profile.train_s
