"""The co-scheduler's record of one job: its status, its SLO clock, and how long its phases take."""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from enum import StrEnum

from slackwater.model.job import ITERATIONS_PER_MOVE, JobProfile, JobSpec
from slackwater.model.placement import Phase, Placement
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.iteration_caps import NEAR_WORST

# Of the declared length: the iterations of jobs whose recent ones were shorter seldom exceed their
# bound, and to hold phases back for them costs more than it saves.
_TARGETED_FROM = 0.85
# Of the time that a job won by iterations far shorter than declared, the part that others may use.
_WON_TO_SHARE = 0.15
_TOLERANCE = 1e-9  # of sums of many floating point times
_LAST = 3
_WEIGHT = 0.25  # of the newest median in the mean


class RecentLength:
    """Of one kind of phase. `mean_s` is a moving mean of the median of the last three lengths; None
    before the second.

    The median ignores a single long phase: the first one starts everything, and in another an
    engine may have died. Two long phases in a row count.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_LAST)
        self.mean_s: float | None = None

    def observe(self, work_s: float) -> None:
        self._last.append(work_s)
        if len(self._last) == 1:
            return
        middle_s = sorted(self._last)[(len(self._last) - 1) // 2]  # of two the shorter
        before_s = middle_s if self.mean_s is None else self.mean_s
        self.mean_s = before_s + _WEIGHT * (middle_s - before_s)


class JobStatus(StrEnum):
    HELD = "held"  # waits for room
    PLACED = "placed"
    SUSPENDED = "suspended"  # crashed, or evicted while it did nothing; may arrive again
    FINISHED = "finished"
    REFUSED = "refused"


@dataclass(slots=True)
class JobState:
    """One job. Its SLO clock runs from its first permit, but not while it is suspended or rests."""

    spec: JobSpec
    size: tuple[int, int]  # devices of each of its rollout and train nodes
    status: JobStatus = JobStatus.HELD
    reason: str = ""
    displaced_reason: str = ""  # why it was displaced, until it has a place again
    epoch: int = 0
    crashes: int = 0
    iterations_done: int = 0
    placement: Placement | None = None
    joined: bool = False  # its state is loaded, and it takes part in its group's order
    next_phase: Phase = Phase.ROLLOUT
    free_s: float = 0.0  # when its last phase, and the sync after it, ended
    clock_since_s: float | None = None  # since when its clock runs
    spent_s: float = 0.0  # on its clock, before that
    is_resting: bool = False
    iteration_began_s: float = 0.0  # on its clock
    moved_at_iteration: float = -math.inf  # how many iterations were done at its last move
    iterations_over: int = 0  # iterations that broke their bound
    # Time that its phases so far would take alone, with its own time between them.
    observed_s: float = 0.0
    observed_before_s: float = 0.0  # the part of it before the running iteration
    recent_rollout: RecentLength = field(default_factory=RecentLength)
    recent_train: RecentLength = field(default_factory=RecentLength)
    drift_profile: JobProfile | None = None  # replaces the declared profile after drift
    # A cache, since every event asks: lengths with this profile in this placement.
    _phases_s: tuple[JobProfile, Placement, float, float] | None = None

    @property
    def profile(self) -> JobProfile:
        """The profile that placement uses."""
        return self.drift_profile or self.spec.profile

    @property
    def overrun(self) -> float:
        """How many times longer than declared its iterations are; at least 1."""
        return max(self.profile.solo_s / self.spec.profile.solo_s, 1.0)

    @property
    def iterations_left(self) -> int:
        return self.spec.iterations - self.iterations_done

    def clock_time_s(self, now_s: float) -> float:
        """What its SLO clock shows."""
        return self.spent_s + (
            now_s - self.clock_since_s if self.clock_since_s is not None else 0.0
        )

    def rest(self) -> None:
        """Stop the clock as of the end of its last phase: by its own choice it asks for nothing."""
        if self.clock_since_s is not None:
            self.spent_s = self.clock_time_s(self.free_s)
            self.clock_since_s, self.is_resting = None, True

    def wake(self, now_s: float) -> None:
        """Start the clock again: it asks for its next phase."""
        if self.is_resting:
            self.clock_since_s, self.is_resting = max(now_s, self.free_s), False

    def budget_s(self, now_s: float, *, realised: bool = False) -> float:
        """The time that its SLO leaves for the remaining iterations.

        The SLO bounds the slowdown against declared lengths, or, if `realised`, against what its
        iterations take alone by observation.
        """
        spec = self.spec
        alone_s = spec.iterations * spec.profile.solo_s
        if realised:
            alone_s = self.observed_s + self.iterations_left * self.recent_solo_s
        return spec.slo * alone_s - self.clock_time_s(now_s)

    def budget_to_share_s(self, now_s: float) -> float:
        """The part of its budget that others may use. Of what iterations shorter than declared won
        it has nothing, or little if they were far shorter.

        So a job nearly keeps its SLO against its real lengths too, as far as the order of a plan
        gets shorter with them.
        """
        spec = self.spec
        alone_s = self.observed_s + self.iterations_left * spec.profile.solo_s
        whole_s, budget_s = self.budget_s(now_s), spec.slo * alone_s - self.clock_time_s(now_s)
        if budget_s < whole_s and self.recent_solo_s < NEAR_WORST * self.profile.solo_s:
            budget_s += _WON_TO_SHARE * (whole_s - budget_s)
        budget_s = min(whole_s, budget_s)
        if spec.slo_scope == "job":
            return budget_s
        return min(
            budget_s,
            self.iterations_left * self.iteration_bound_s - max(self.iteration_s(now_s), 0.0),
        )

    @property
    def iteration_bound_s(self) -> float:
        """The longest that one iteration may take; infinite if the SLO bounds the whole job."""
        scope = self.spec.slo_scope
        return self.spec.slo * self.profile.solo_s if scope == "iteration" else math.inf

    @property
    def iteration_target_s(self) -> float:
        """The longest that one iteration should take, also where the SLO bounds the whole job;
        infinite until some were seen, and while they are much shorter than declared.
        """
        if self.recent_rollout.mean_s is None or self.recent_train.mean_s is None:
            return math.inf
        is_targeted = self.recent_solo_s >= _TARGETED_FROM * self.profile.solo_s
        return self.spec.slo * self.profile.solo_s if is_targeted else math.inf

    def iteration_s(self, now_s: float) -> float:
        """How long the running iteration has taken; below 0 in the sync before it.

        The iteration of a move is over its bound whatever comes, so its time does not count. Else
        the order would favour it in vain, and break the iterations of others.
        """
        if self.moved_at_iteration == self.iterations_done:
            return -math.inf
        return self.clock_time_s(now_s) - self.iteration_began_s

    def end_iteration(self, now_s: float) -> None:
        """Its train phase ended; the iteration ends with the sync."""
        self.next_phase = Phase.ROLLOUT
        self.iterations_done += 1
        self.free_s = now_s + self.sync_s
        began_s, self.iteration_began_s = self.iteration_began_s, self.clock_time_s(self.free_s)
        bound_s = self.spec.slo * self.profile.solo_s * (1 + _TOLERANCE)
        self.iterations_over += self.iteration_began_s - began_s > bound_s
        self.observed_before_s = self.observed_s - self.sync_s

    @property
    def may_move(self) -> bool:
        """Whether its SLO allows a move, which breaks an iteration.

        An SLO that bounds iterations allows one broken iteration in `ITERATIONS_PER_MOVE`: as many
        must have passed since the last move, and as many must remain.
        """
        least = min(self.iterations_done - self.moved_at_iteration, self.iterations_left)
        return self.spec.slo_scope == "job" or least >= ITERATIONS_PER_MOVE

    @property
    def recent_solo_s(self) -> float:
        """The length of one iteration alone, by recent observation."""
        profile = self.profile
        rollout_s, train_s = self.recent_rollout.mean_s, self.recent_train.mean_s
        rollout_s = profile.rollout_s if rollout_s is None else rollout_s
        return rollout_s + (profile.train_s if train_s is None else train_s) + profile.sync_s

    def phase_s(self, phase: Phase, fleet: FleetView) -> float:
        """The worst-case length of a phase on the nodes where the job is placed."""
        profile, placement, known = self.profile, self.placement, self._phases_s
        assert placement is not None
        if known is None or known[0] is not profile or known[1] is not placement:
            train_nodes = len(placement.train_nodes)
            rollout_s = profile.rollout_s
            if self.is_local:
                rollout_s = fleet.local_rollout_s(profile, train_nodes)
            train_s = fleet.train_s(profile, train_nodes)
            known = self._phases_s = (profile, placement, rollout_s, train_s)
        return known[3] if phase is Phase.TRAIN else known[2]

    @property
    def is_local(self) -> bool:
        """Whether all its phases run on train nodes: then nothing is synced over the link."""
        assert self.placement is not None
        return self.placement.rollout_nodes == self.placement.train_nodes

    @property
    def sync_s(self) -> float:
        return 0.0 if self.is_local else self.profile.sync_s

    def observe(self, phase: Phase, work_s: float) -> None:
        """Record a phase that takes `work_s` on the nodes of its profile."""
        self.observed_s += work_s + (self.spec.profile.sync_s if phase is Phase.TRAIN else 0.0)
        (self.recent_train if phase is Phase.TRAIN else self.recent_rollout).observe(work_s)

    def profile_after_drift(
        self, tolerance: float, headroom: float, *, both_ways: bool = False
    ) -> JobProfile | None:
        """A profile with headroom over recent lengths, if those are longer than placement assumes
        (or, with `both_ways`, much shorter); else None.
        """
        profile = self.profile
        rollout_s, train_s = self.recent_rollout.mean_s, self.recent_train.mean_s
        if rollout_s is None or train_s is None:
            return None
        ratios = rollout_s / profile.rollout_s, train_s / profile.train_s
        room = 1 + headroom
        if max(ratios) > 1 + tolerance:
            pick = max
        elif both_ways and min(ratios) * room**2 < 1:
            pick = min
        else:
            return None
        return replace(
            profile,
            rollout_s=pick(profile.rollout_s, rollout_s * room),
            train_s=pick(profile.train_s, train_s * room),
        )
