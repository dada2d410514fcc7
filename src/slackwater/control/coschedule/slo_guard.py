"""Whether jobs that share nodes keep their SLOs, and which member prevents that."""

from collections.abc import Sequence

from slackwater.control.coschedule.config import CoScheduleConfig
from slackwater.control.coschedule.groups import Groups
from slackwater.control.coschedule.job_state import JobState
from slackwater.model.placement import Phase
from slackwater.policy.placement.fleet import FleetView

_UNPROFILED_WAITS = 2.0  # iterations of the members before they may have to wait for it


class SloGuard:
    """Checks a job's SLO once per iteration."""

    def __init__(self, config: CoScheduleConfig, fleet: FleetView, groups: Groups) -> None:
        self._config = config
        self._fleet = fleet
        self._groups = groups

    def budget_s(self, state: JobState, now_s: float) -> float:
        """The time that its SLO leaves for the remaining iterations."""
        return state.budget_s(now_s, realised=self._config.slo_basis == "realised")

    def budget_to_share_s(self, state: JobState, now_s: float) -> float:
        """The part of its budget that others may use."""
        if self._config.slo_basis == "declared":
            return state.budget_to_share_s(now_s)
        return self.budget_s(state, now_s)

    def must_isolate(self, state: JobState, now_s: float) -> bool:
        """Whether after one more shared iteration, at worst-case lengths, it could be too late to
        finish in time on nodes of its own.
        """
        if not self._config.guard or not self._groups.shares(state):
            return False
        budget_s = self.budget_s(state, now_s)
        alone_s = state.iterations_left * state.profile.solo_s
        move_s = self._fleet.move.restart_s(state.profile)
        if alone_s + move_s > budget_s:
            return False  # Moving would break it for certain; its group may still hold.
        worst_s = self._groups.worst_iteration_s(state)
        if state.iterations_left * worst_s <= budget_s:
            return False
        return alone_s + move_s + worst_s > budget_s

    def find_overrunning_member(self, state: JobState, now_s: float) -> JobState | None:
        """The member that overruns its declared profile most, if the job loses its SLO beside it.

        None if the job overruns its own profile as much, or if it would keep its SLO alone from the
        iteration after the next: a member may be slow for a while, as when others start beside it.
        """
        if not self._config.guard or self._config.slo_basis == "declared":
            return None
        others = self._groups.mates(state)
        slowest = max(others, key=lambda member: member.overrun, default=None)
        most = max(state.overrun, 1.0) * (1 + self._config.drift_tolerance)
        if slowest is None or slowest.overrun <= most:
            return None
        budget_s, next_s = self.budget_s(state, now_s), self._groups.next_iteration_s(state)
        if state.iterations_left * next_s <= budget_s:
            return None
        alone_s = state.iterations_left * state.recent_solo_s
        return slowest if alone_s + 2 * next_s > budget_s else None

    def can_bear_step(
        self, members: Sequence[JobState], step_s: float | None, now_s: float
    ) -> bool:
        """Whether these members keep their SLOs if an unprofiled job has their train node for
        `step_s`; if that is None (unknown), for as long as the longest of their own train phases.

        A member that rolls out does not need the node before its rollout ends. Half of the
        remaining rollout is counted, since responses may be shorter than usual.
        """
        if not members or not self._config.guard:
            return True
        if step_s is None:
            step_s = max(state.phase_s(Phase.TRAIN, self._fleet) for state in members)
        return all(
            self._slack_s(state, now_s) + self._groups.remaining_rollout_s(state, now_s) / 2
            >= step_s
            for state in members
        )

    def _slack_s(self, state: JobState, now_s: float) -> float:
        """How long it may wait beside its next iterations; within one, if its SLO bounds each."""
        next_s = self._groups.next_iteration_s(state)
        slack_s = self.budget_s(state, now_s) - state.iterations_left * next_s
        return max(min(slack_s, state.iteration_bound_s - next_s), 0.0)

    def can_bear_unprofiled_phase(
        self, members: Sequence[JobState], phase: Phase, waited_s: float, now_s: float
    ) -> bool:
        """Whether these members keep their SLOs if an unprofiled job, which has waited so long, has
        a phase before them. Its length is unknown: assume the longest of theirs.
        """
        if not members:
            return True
        next_s = {state.spec.job: self._groups.next_iteration_s(state) for state in members}
        if waited_s < _UNPROFILED_WAITS * max(next_s.values()):
            return False
        guess_s = max(state.phase_s(phase, self._fleet) for state in members)
        return not self._config.guard or all(
            self.budget_s(state, now_s) - state.iterations_left * next_s[state.spec.job] >= guess_s
            for state in members
        )
