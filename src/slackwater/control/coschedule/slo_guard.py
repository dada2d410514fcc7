"""Whether jobs that share nodes stay within their bounds, and who is in the way of one that does
not.
"""

from collections.abc import Sequence

from slackwater.control.coschedule.config import CoScheduleConfig
from slackwater.control.coschedule.groups import Groups
from slackwater.control.coschedule.job_state import JobState
from slackwater.model.placement import Phase
from slackwater.policy.placement.fleet import FleetView

_GUEST_WAITS = 2.0  # iterations of the members, before they wait for it


class SloGuard:
    """Asked once per iteration of a job."""

    def __init__(self, config: CoScheduleConfig, fleet: FleetView, groups: Groups) -> None:
        self._config = config
        self._fleet = fleet
        self._groups = groups

    def budget_s(self, state: JobState, now_s: float) -> float:
        """What its bound leaves for the iterations still to make."""
        return state.budget_s(now_s, realised=self._config.slo_basis == "realised")

    def budget_to_share_s(self, state: JobState, now_s: float) -> float:
        """What others may use of that."""
        if self._config.slo_basis == "declared":
            return state.budget_to_share_s(now_s)
        return self.budget_s(state, now_s)

    def must_leave(self, state: JobState, now_s: float) -> bool:
        """Whether one more shared iteration at worst could leave too little to finish alone at
        worst, on nodes of its own.
        """
        if not self._config.guard or not self._groups.shares(state):
            return False
        budget_s = self.budget_s(state, now_s)
        alone_s = state.iterations_left * state.profile.solo_s
        move_s = self._fleet.move.of(state.profile)
        if alone_s + move_s > budget_s:
            return False  # Moving would break it for certain; its group may still hold.
        worst_s = self._groups.worst_iteration_s(state)
        if state.iterations_left * worst_s <= budget_s:
            return False
        return alone_s + move_s + worst_s > budget_s

    def intruder(self, state: JobState, now_s: float) -> JobState | None:
        """A member that takes longer than was declared of it, where a job beside it cannot keep its
        bound for that: the one that outgrew its profile most. None where the job itself has
        outgrown its own as much, where all is well, and as long as the job would keep its bound if
        it were alone from the iteration after the next: a member may be slow for a while, as when
        others start beside it.
        """
        if not self._config.guard or self._config.slo_basis == "declared":
            return None
        mates = self._groups.mates(state)
        grown = max(mates, key=lambda mate: mate.outgrown, default=None)
        if grown is None or grown.outgrown <= max(state.outgrown, 1.0) * (
            1 + self._config.drift_tolerance
        ):
            return None
        budget_s, coming_s = self.budget_s(state, now_s), self._groups.coming_iteration_s(state)
        if state.iterations_left * coming_s <= budget_s:
            return None
        alone_s = state.iterations_left * state.recent_solo_s
        return grown if alone_s + 2 * coming_s > budget_s else None

    def bear_step(self, members: Sequence[JobState], step_s: float | None, now_s: float) -> bool:
        """Whether these members keep their bounds if their train node is taken for so long now;
        for as long as the longest of their own train phases while nobody knows.

        A member that rolls out does not miss the node until it has done; half of what that takes
        lately is counted, since responses may be shorter.
        """
        if not members or not self._config.guard:
            return True
        if step_s is None:
            step_s = max(state.phase_s(Phase.TRAIN, self._fleet) for state in members)
        return all(
            self._slack_s(state, now_s) + self._groups.rolls_out_for_s(state, now_s) / 2 >= step_s
            for state in members
        )

    def _slack_s(self, state: JobState, now_s: float) -> float:
        """What it may still wait beside the iterations to come, in one of them where its SLO
        bounds each.
        """
        coming_s = self._groups.coming_iteration_s(state)
        slack_s = self.budget_s(state, now_s) - state.iterations_left * coming_s
        return max(min(slack_s, state.iteration_bound_s - coming_s), 0.0)

    def bear_guest(
        self, members: Sequence[JobState], phase: Phase, waited_s: float, now_s: float
    ) -> bool:
        """Whether these members all keep their bounds if a guest that has waited so long has a
        phase before them. Nobody knows how long that is: as long as the longest of theirs, at a
        guess.
        """
        if not members:
            return True
        coming_s = {state.spec.job: self._groups.coming_iteration_s(state) for state in members}
        if waited_s < _GUEST_WAITS * max(coming_s.values()):
            return False
        guess_s = max(state.phase_s(phase, self._fleet) for state in members)
        return not self._config.guard or all(
            self.budget_s(state, now_s) - state.iterations_left * coming_s[state.spec.job]
            >= guess_s
            for state in members
        )
