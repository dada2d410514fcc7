"""Admission: places arriving jobs, retries held ones, and rebalances placed ones.

Rebalances and retries grow with the number of jobs. So one event runs a bounded part of one of
them, and a timer that is due at once runs the rest. Rebalances go first: they make room. A retry
tries every held job once, in order of admission. If a job departs meanwhile, the retry still
finishes and another one follows, so that the end of the queue does not starve.

Placements of one instant are applied together, so that a job starts once, where the last rebalance
puts it; with several arrivals, the rebalance of the last one, and with held jobs to try, the one
after the last of them.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from slackwater.control.coschedule.commands import Command, HoldJob, RefuseJob
from slackwater.control.coschedule.config import CoScheduleConfig
from slackwater.control.coschedule.job_state import JobState, JobStatus
from slackwater.control.coschedule.placement_table import PlacementTable
from slackwater.control.coschedule.slo_guard import SloGuard
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobSpec
from slackwater.model.placement import Placement, Refusal
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.interface import JobProgress, PlacementPolicy

_REBALANCE = "coschedule:rebalance"
_CONTINUE = "coschedule:continue"  # the timer of rebalances and retries that are not done
_RETRIES = 3  # per event: each takes up to 2 ms where many jobs are placed


class Admission:
    """Asks the placement policy, and applies its placements."""

    def __init__(
        self,
        policy: PlacementPolicy,
        fleet: FleetView,
        config: CoScheduleConfig,
        places: PlacementTable,
        guard: SloGuard,
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._config = config
        self._places = places
        self._guard = guard
        self.held: dict[JobId, JobState] = {}
        self._queue: deque[JobId] = deque()  # held jobs that the running retry has not tried yet
        self._retry_due = False
        # By size: when a rebalance is due, and for which job.
        self._rebalances: dict[tuple[int, int], tuple[float, JobState]] = {}
        # To apply after the rebalances of this instant.
        self._placements: dict[JobId, Placement] = {}
        self._decided_s: float | None = None  # when they, or changes of rent, were decided
        self._others_follow = False  # in this instant, so that placements are not applied yet
        # When, and which size (None: all).
        self._observed: tuple[float, tuple[int, int] | None] = (0.0, None)
        self._rebalance_all_at_s: float | None = None

    def arrive(
        self, state: JobState, now_s: float, *, others_follow: bool = False
    ) -> list[Command]:
        """Place an arriving job, or hold it."""
        self._others_follow = others_follow
        self.held[state.spec.job] = state  # The policy sees it among those that want room.
        self.observe(now_s, state)
        commands = self._admit(state, now_s)
        if state.spec.job in self._placements:
            commands.extend(self._rebalance_size(state, now_s))
        elif self.has_pending_placements():
            commands.extend(self._decide((), now_s))
        commands.extend(self._set_continue_timer(now_s))
        if self._config.rebalance_every_s and self._rebalance_all_at_s is None:
            commands.append(self._set_rebalance_timer(now_s))
        return commands

    def hold(self, state: JobState, now_s: float) -> list[Command]:
        """Hold a job that was displaced, and try it again soon."""
        self.held[state.spec.job] = state
        self._retry_due = True
        return self._set_continue_timer(now_s)

    def _admit(self, state: JobState, now_s: float) -> list[Command]:
        job = state.spec.job
        answer = self._policy.place(state.spec, now_s)
        if isinstance(answer, Refusal):
            reason = (
                f"{state.displaced_reason}; {answer.reason}"
                if state.displaced_reason
                else answer.reason
            )
            changed = state.reason != reason
            state.reason = reason
            if answer.final:
                state.status = JobStatus.REFUSED
                del self.held[job]
                return [RefuseJob(job, reason)]
            state.status = JobStatus.HELD
            return [HoldJob(job, reason)] if changed else []
        del self.held[job]
        # Its neighbours were observed just before; on an owned fleet it takes some of their time.
        others = self._places.jobs_of_same_size(state) if self._fleet.owned else ()
        self._observe_jobs(now_s, (*others, state), state.size)
        self._rebalances[state.size] = (now_s, state)
        return self._decide([answer], now_s)

    def depart(self, leaving: Sequence[JobState], now_s: float) -> list[Command]:
        """Take jobs off their nodes; rebalance the others and retry the held ones."""
        freed: list[NodeId] = []
        by_size: dict[tuple[int, int], list[JobState]] = {}
        for state in leaving:
            freed.extend(self._places.withdraw(state, now_s))
            by_size.setdefault(state.size, []).append(state)
        for states in by_size.values():
            self.observe(now_s, states[0])
            for state in states:
                self._policy.remove(state.spec.job)
            self._schedule_rebalance(states[0], now_s)
        self._retry_due = True
        commands = self._continue_rebalance(now_s)
        commands.extend(self._places.grant(tuple(freed), now_s))
        return commands + self._set_continue_timer(now_s)

    def _rebalance_size(self, state: JobState, now_s: float) -> list[Command]:
        moves = self._policy.rebalance(now_s, state.spec.profile)
        self._schedule_rebalance(state, now_s)
        self._retry_due |= bool(moves)  # the moves may have made room
        return self._decide(moves, now_s)

    def _decide(self, placements: Sequence[Placement], now_s: float) -> list[Command]:
        """Note placements; apply them if nothing else of this instant can change them."""
        for placement in placements:
            self._placements.pop(placement.job, None)  # the latest comes last
            self._placements[placement.job] = placement
        self._decided_s = now_s
        if self._others_follow or self._due_rebalance(now_s) or self._has_retry:
            return []
        return self.apply_pending(now_s)

    def apply_pending(self, now_s: float) -> list[Command]:
        """Apply the noted placements, and rent and return nodes."""
        placements = list(self._placements.values())
        self._placements.clear()
        self._decided_s = None
        return self._places.apply(placements, now_s)

    def has_pending_placements(self, now_s: float | None = None) -> bool:
        """Whether placements are not applied yet; with `now_s`, only those of another instant."""
        return self._decided_s is not None and self._decided_s != now_s

    def _schedule_rebalance(self, state: JobState, now_s: float) -> None:
        """Rebalance the jobs of this one's size when the policy has something to look at."""
        at_s = self._policy.next_rebalance_s(state.spec.profile, now_s)
        self._rebalances.pop(state.size, None)
        if at_s is not None:
            self._rebalances[state.size] = (at_s, state)

    def _due_rebalance(self, now_s: float) -> JobState | None:
        """The job whose rebalance has waited longest, if any is due."""
        return next((state for at_s, state in self._rebalances.values() if at_s <= now_s), None)

    def _continue_rebalance(self, now_s: float) -> list[Command]:
        """Run a part of a rebalance that is due; rent changes are applied in any case."""
        state = self._due_rebalance(now_s)
        if state is None:
            return self._decide((), now_s)
        # After its own moves of this instant only the policy knows what their restarts cost.
        if not self._is_observed(now_s, state):
            self.observe(now_s, state)
        return self._rebalance_size(state, now_s)

    def _retry(self, now_s: float) -> list[Command]:
        """Try some held jobs of one size until one has a place: then a rebalance comes first."""
        if self._retry_due and not self._queue:
            order = self._policy.admission_order(_waiting(self.held.values()))
            self._queue.extend(sorted(order, key=lambda job: -self.held[job].spec.priority))
            self._retry_due = False
        commands: list[Command] = []
        tried = 0
        while self._queue and tried < _RETRIES:
            state = self.held.get(self._queue[0])
            if state is not None and not self._is_observed(now_s, state):
                if tried:
                    break
                self.observe(now_s, state)
            self._queue.popleft()
            if state is None:
                continue
            tried += 1
            commands.extend(self._admit(state, now_s))
            if state.spec.job in self._placements:
                break
            if state.status is JobStatus.HELD and not self._config.backfill:
                self._queue.clear()
        return commands

    @property
    def _has_retry(self) -> bool:
        """Whether held jobs are still to be tried: the rebalance after one may move others."""
        return bool(self._queue) or (self._retry_due and bool(self.held))

    def _set_continue_timer(self, now_s: float) -> list[Command]:
        times_s = [at_s for at_s, _ in self._rebalances.values()]
        if self._has_retry or self.has_pending_placements():
            times_s.append(now_s)
        return [SetTimer(_CONTINUE, max(min(times_s), now_s))] if times_s else []

    def on_timer(self, event: TimerFired) -> list[Command]:
        """Continue rebalances and retries, or begin the periodic rebalance of all jobs."""
        if event.name == _CONTINUE:
            self._others_follow = False
            retries = self._has_retry and self._due_rebalance(event.now_s) is None
            step = self._retry if retries else self._continue_rebalance
            return step(event.now_s) + self._set_continue_timer(event.now_s)
        due_s = self._rebalance_all_at_s
        if event.name != _REBALANCE or due_s is None or event.now_s < due_s:
            return []
        self._rebalance_all_at_s = None
        self._observe_jobs(event.now_s, self._places.placed.values(), None)
        commands = self._decide(self._policy.rebalance(event.now_s), event.now_s)
        if self._places.placed or self.held:
            commands.append(self._set_rebalance_timer(event.now_s))
        return commands

    def _set_rebalance_timer(self, now_s: float) -> SetTimer:
        self._rebalance_all_at_s = now_s + self._config.rebalance_every_s
        return SetTimer(_REBALANCE, self._rebalance_all_at_s)

    def _is_observed(self, now_s: float, state: JobState) -> bool:
        return self._observed == (now_s, state.size)

    def observe(self, now_s: float, state: JobState) -> None:
        """Show the policy the progress of the placed jobs of this one's size, and the held ones."""
        self._observe_jobs(now_s, self._places.jobs_of_same_size(state), state.size)

    def _observe_jobs(
        self, now_s: float, placed: Iterable[JobState], size: tuple[int, int] | None
    ) -> None:
        progress = [
            JobProgress(
                job=state.spec.job,
                iterations_left=state.iterations_left,
                budget_s=self._guard.budget_to_share_s(state, now_s),
                rollout_s=state.recent_rollout.mean_s,
                train_s=state.recent_train.mean_s,
                may_move=state.may_move,
            )
            for state in placed
            if state.iterations_left  # else it is in its last sync, about to leave
        ]
        self._observed = (now_s, size)
        held = [state for state in self.held.values() if size in (None, state.size)]
        self._policy.observe(progress, _waiting(held))


def _waiting(held: Iterable[JobState]) -> list[JobSpec]:
    """The specs of held jobs, in order of arrival, with their remaining iterations."""
    return [
        replace(state.spec, iterations=max(state.iterations_left, 1))
        if state.iterations_done
        else state.spec
        for state in held
    ]
