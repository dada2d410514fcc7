"""Who gets a place when: jobs that come, those that wait, and looks for moves that pay.

Looks and retries grow with the number of jobs, so one event takes a bounded part of one of them and
a timer that is due at once brings the rest. Looks go first: they make room. A retry tries everybody
who waits once, in order of admission; a departure meanwhile lets it come to its end and begins
another, so that nobody at the end of the queue is passed over for ever. Answers of one instant are
carried out together, so that a job starts once, where the last look leaves it.
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
_CONTINUE = "coschedule:continue"  # looks and retries go on
_RETRIES = 3  # of one event: each takes up to 2 ms where many jobs have places


class Admission:
    """Asks the placement policy, and carries out its answers."""

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
        self._queue: deque[JobId] = deque()  # those that this retry has still to try
        self._retry_again = False
        self._looks: dict[tuple[int, int], tuple[float, JobState]] = {}  # by size: when, for whom
        self._answers: dict[JobId, Placement] = {}  # that wait for the looks of their instant
        self._answered_s: float | None = None  # when they, or changes of rent, were given
        self._observed: tuple[float, tuple[int, int] | None] = (0.0, None)  # when, and which size
        self._rebalance_at_s: float | None = None

    def arrive(self, state: JobState, now_s: float) -> list[Command]:
        """Find a place for a job that has come, or hold it."""
        self.held[state.spec.job] = state  # Policies see it among those that want room.
        self.observe(now_s, state)
        commands = self._admit(state, now_s)
        if state.spec.job in self._answers:
            commands.extend(self._rebalance(state, now_s))
        commands.extend(self._continue_later(now_s))
        if self._config.rebalance_every_s and self._rebalance_at_s is None:
            commands.append(self._set_rebalance(now_s))
        return commands

    def hold(self, state: JobState, now_s: float) -> list[Command]:
        """A job that had to make room waits, and is tried again soon."""
        self.held[state.spec.job] = state
        self._retry_again = True
        return self._continue_later(now_s)

    def _admit(self, state: JobState, now_s: float) -> list[Command]:
        job = state.spec.job
        answer = self._policy.place(state.spec, now_s)
        if isinstance(answer, Refusal):
            reason = f"{state.displaced}; {answer.reason}" if state.displaced else answer.reason
            changed = state.reason != reason
            state.reason = reason
            if answer.final:
                state.status = JobStatus.REFUSED
                del self.held[job]
                return [RefuseJob(job, reason)]
            state.status = JobStatus.HELD
            return [HoldJob(job, reason)] if changed else []
        del self.held[job]
        # The others stand as just told, but on an owned fleet where one has less time beside it.
        others = self._places.alike(state) if self._fleet.owned else ()
        self._tell(now_s, (*others, state), state.size)
        self._looks[state.size] = (now_s, state)
        return self._answer([answer], now_s)

    def depart(self, leaving: Sequence[JobState], now_s: float) -> list[Command]:
        """Jobs leave their nodes: others move together, and those that wait are tried again."""
        freed: list[NodeId] = []
        by_size: dict[tuple[int, int], list[JobState]] = {}
        for state in leaving:
            freed.extend(self._places.withdraw(state, now_s))
            by_size.setdefault(state.size, []).append(state)
        for states in by_size.values():
            self.observe(now_s, states[0])
            for state in states:
                self._policy.remove(state.spec.job)
            self._look_later(states[0], now_s)
        commands = self._look(now_s)
        commands.extend(self._places.grant(tuple(freed), now_s))
        self._retry_again = True
        return commands + self._continue_later(now_s)

    def _rebalance(self, state: JobState, now_s: float) -> list[Command]:
        moves = self._policy.rebalance(now_s, state.spec.profile)
        self._look_later(state, now_s)
        self._retry_again |= bool(moves)  # they may have made room
        return self._answer(moves, now_s)

    def _answer(self, placements: Sequence[Placement], now_s: float) -> list[Command]:
        """Note answers of the policy, the latest last, and carry them out if no look can change
        them any more.
        """
        for told in placements:
            self._answers.pop(told.job, None)
            self._answers[told.job] = told
        self._answered_s = now_s
        return [] if self._due(now_s) else self.settle(now_s)

    def settle(self, now_s: float) -> list[Command]:
        """Carry out what was answered, and rent and give back nodes."""
        answers = list(self._answers.values())
        self._answers.clear()
        self._answered_s = None
        return self._places.apply(answers, now_s)

    def is_unsettled(self, now_s: float | None = None) -> bool:
        """Whether answers are still to be carried out (if given, of an instant before this)."""
        return self._answered_s is not None and self._answered_s != now_s

    def _look_later(self, state: JobState, now_s: float) -> None:
        """Let a look for moves of jobs of this one's size go on when it has anything to look at."""
        at_s = self._policy.next_look_s(state.spec.profile, now_s)
        self._looks.pop(state.size, None)
        if at_s is not None:
            self._looks[state.size] = (at_s, state)

    def _due(self, now_s: float) -> JobState | None:
        """For whom the look is that has waited longest."""
        return next((state for at_s, state in self._looks.values() if at_s <= now_s), None)

    def _look(self, now_s: float) -> list[Command]:
        """A part of a look that is due; rent is settled in any case."""
        state = self._due(now_s)
        if state is None:
            return self._answer((), now_s)
        # What those that it has just moved lose by their restart is known to the policy alone.
        if not self._is_observed(now_s, state):
            self.observe(now_s, state)
        return self._rebalance(state, now_s)

    def _retry(self, now_s: float) -> list[Command]:
        """Try some of those that wait, of one size, until one has a place: a look comes next."""
        if self._retry_again and not self._queue:
            order = self._policy.admission_order(_waiting(self.held.values()))
            self._queue.extend(sorted(order, key=lambda job: -self.held[job].spec.priority))
            self._retry_again = False
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
            if state.spec.job in self._answers:
                break
            if state.status is JobStatus.HELD and not self._config.backfill:
                self._queue.clear()
        return commands

    def _continue_later(self, now_s: float) -> list[Command]:
        times_s = [at_s for at_s, _ in self._looks.values()]
        if self._queue or (self._retry_again and self.held):
            times_s.append(now_s)
        return [SetTimer(_CONTINUE, max(min(times_s), now_s))] if times_s else []

    def on_timer(self, event: TimerFired) -> list[Command]:
        """Go on with looks and retries, or look at all jobs because it is time."""
        if event.name == _CONTINUE:
            step = self._look if self._due(event.now_s) else self._retry
            return step(event.now_s) + self._continue_later(event.now_s)
        due_s = self._rebalance_at_s
        if event.name != _REBALANCE or due_s is None or event.now_s < due_s:
            return []
        self._rebalance_at_s = None
        self._tell(event.now_s, self._places.placed.values(), None)
        commands = self._answer(self._policy.rebalance(event.now_s), event.now_s)
        if self._places.placed or self.held:
            commands.append(self._set_rebalance(event.now_s))
        return commands

    def _set_rebalance(self, now_s: float) -> SetTimer:
        self._rebalance_at_s = now_s + self._config.rebalance_every_s
        return SetTimer(_REBALANCE, self._rebalance_at_s)

    def _is_observed(self, now_s: float, state: JobState) -> bool:
        return self._observed == (now_s, state.size)

    def observe(self, now_s: float, state: JobState) -> None:
        """Tell the policy how the placed jobs of one's size stand, and who waits."""
        self._tell(now_s, self._places.alike(state), state.size)

    def _tell(self, now_s: float, placed: Iterable[JobState], size: tuple[int, int] | None) -> None:
        standings = [
            JobProgress(
                job=state.spec.job,
                iterations_left=state.iterations_left,
                budget_s=self._guard.budget_to_share_s(state, now_s),
                rollout_s=state.recent_rollout.lately_s,
                train_s=state.recent_train.lately_s,
                may_move=state.may_move,
            )
            for state in placed
            if state.iterations_left  # else in its last sync, about to leave
        ]
        self._observed = (now_s, size)
        held = [state for state in self.held.values() if size in (None, state.size)]
        self._policy.observe(standings, _waiting(held))


def _waiting(held: Iterable[JobState]) -> list[JobSpec]:
    """Jobs without nodes, in order of arrival, with the iterations that they have still to make."""
    return [
        replace(state.spec, iterations=max(state.iterations_left, 1))
        if state.iterations_done
        else state.spec
        for state in held
    ]
