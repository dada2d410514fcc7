"""What becomes of a job that does not get on, goes on and on, or does nothing: by how long that is,
and by who waits.
"""

from enum import Enum, auto

from slackwater.control.coschedule.job_phases import JobPhases
from slackwater.control.coschedule.phase_limits import PhaseLimits
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.model.placement import Phase


class IdleRule(Enum):
    """What is done about a job that asks for nothing."""

    LOOK_AGAIN = auto()  # it has not been still for long, or nobody minds
    END_PHASE = auto()  # others wait for nodes that it does nothing with
    REST = auto()  # nobody should wait for its turn
    MAKE_ROOM = auto()  # others wait for a place


class PhaseWatch:
    """Decides; the phase keeper carries out."""

    def __init__(self, scheduler: CoScheduler, limits: PhaseLimits) -> None:
        self._scheduler = scheduler
        self._limits = limits

    def why_lost(self, one: JobPhases, now_s: float) -> str | None:
        """Why it loses its permit; None while it may go on."""
        hold = one.hold
        if hold is None:
            return None
        known_s, silent_s = self._known_s(one, hold.phase), now_s - hold.heard_s
        if not one.asks:
            return self._limits.why_stuck(hold.phase, silent_s, known_s)
        return self._limits.why_given_up(hold.phase, now_s - hold.since_s, known_s, silent_s)

    def goes_on(self, one: JobPhases, phase: Phase, now_s: float) -> bool:
        """Whether it has been in such a phase, inferred, for much longer than is known of it.
        Training that another waits for may not take `least_s` where less is known.
        """
        if one.hold is None or one.asks or one.hold.phase is not phase:
            return False
        known_s = self._known_s(one, phase)
        most_s = self._limits.lets_others_in_after_s(known_s)
        if known_s is not None and phase is Phase.TRAIN and self.is_waited_for(one):
            most_s = self._limits.share_after * known_s
        return one.cut_s + now_s - one.hold.since_s >= most_s

    def rolls_on(self, one: JobPhases, now_s: float) -> bool:
        """Whether its rollout goes on while another waits for the nodes."""
        return self.goes_on(one, Phase.ROLLOUT, now_s) and self.is_waited_for(one)

    def is_waited_for(self, one: JobPhases) -> bool:
        """Whether another waits for the nodes that it holds, or for its turn after this one."""
        return one.hold is not None and self._scheduler.is_waited_for(one.job, one.hold.nodes)

    def trains_on(self, one: JobPhases) -> bool:
        """Whether a job that only trains would, after this step, wait for the nodes of a rollout
        that it does not make, while nobody waits for it.
        """
        return self._scheduler.is_rollout_held(one.job) and not self.is_waited_for(one)

    def stillness(self, one: JobPhases, now_s: float) -> IdleRule | None:
        """None if it has something to do."""
        if one.is_quiet:
            assert one.hold is not None
            still = now_s - one.hold.heard_s >= self._limits.rest_s - 1e-6
            ends = still and self.is_waited_for(one)
            return IdleRule.END_PHASE if ends else IdleRule.LOOK_AGAIN
        if not one.is_idle or not one.epoch:
            return None
        still_s = now_s - one.idle_since_s
        silent = one.heard_s is not None and now_s - one.heard_s > self._limits.lease_s
        if self._scheduler.holds_jobs and (silent or still_s >= self._limits.yield_s):
            return IdleRule.MAKE_ROOM
        rests = still_s >= self._limits.rest_s - 1e-6
        return IdleRule.REST if rests else IdleRule.LOOK_AGAIN

    def _known_s(self, one: JobPhases, phase: Phase) -> float | None:
        state = self._scheduler.find(one.job)
        if state is None or state.placement is None:
            return None
        return state.profile.rollout_s if phase is Phase.ROLLOUT else state.profile.train_s
