"""What the co-scheduler knows of one job."""

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from slackwater.control.coschedule.recent_length import RecentLength
from slackwater.model.job import ITERATIONS_PER_MOVE, JobProfile, JobSpec
from slackwater.model.placement import Phase, Placement
from slackwater.policy.placement.fleet import FleetView

_TOLERANCE = 1e-9  # of sums of many floating point times


class JobStatus(StrEnum):
    """Where a job stands."""

    HELD = "held"  # waits for room
    PLACED = "placed"
    AWAY = "away"  # crashed, or another job has its place while it does nothing; may come back
    FINISHED = "finished"
    REFUSED = "refused"


@dataclass(slots=True)
class JobState:
    """One job. Its SLO clock runs from its first permit, and stands still while it is away or
    rests.
    """

    spec: JobSpec
    size: tuple[int, int]  # devices of each of its rollout and train nodes
    status: JobStatus = JobStatus.HELD
    reason: str = ""
    displaced: str = ""  # why it had to make room, until it has a place again
    epoch: int = 0
    crashes: int = 0
    iterations_done: int = 0
    placement: Placement | None = None
    joined: bool = False  # its state is loaded, and it takes part in its group's order
    next_phase: Phase = Phase.ROLLOUT
    free_s: float = 0.0  # when its last phase, and the sync after it, ended
    clock_s: float | None = None  # since when its clock runs
    spent_s: float = 0.0  # before that
    rests: bool = False
    iteration_began_s: float = 0.0  # on its clock
    moved_at: float = -math.inf  # iterations that were done then
    iterations_over: int = 0  # that took longer than the SLO bounds one to
    seen_s: float = 0.0  # what its phases so far, and its own time between them, take alone
    iteration_seen_s: float = 0.0  # of that, before the running iteration
    recent_rollout: RecentLength = field(default_factory=RecentLength)
    recent_train: RecentLength = field(default_factory=RecentLength)
    planned: JobProfile | None = None  # after drift; else the declared one

    @property
    def profile(self) -> JobProfile:
        """What placement goes by."""
        return self.planned or self.spec.profile

    @property
    def outgrown(self) -> float:
        """How many times longer its iterations are than was declared of it; 1 as long as they are
        not.
        """
        return max(self.profile.solo_s / self.spec.profile.solo_s, 1.0)

    @property
    def iterations_left(self) -> int:
        return self.spec.iterations - self.iterations_done

    def elapsed_s(self, now_s: float) -> float:
        """On its SLO clock."""
        return self.spent_s + (now_s - self.clock_s if self.clock_s is not None else 0.0)

    def rest(self) -> None:
        """It asks for nothing, by its own choice, since its last phase ended."""
        if self.clock_s is not None:
            self.spent_s = self.elapsed_s(self.free_s)
            self.clock_s, self.rests = None, True

    def wake(self, now_s: float) -> None:
        """It asks for its next phase."""
        if self.rests:
            self.clock_s, self.rests = max(now_s, self.free_s), False

    def budget_s(self, now_s: float, *, realised: bool = False) -> float:
        """What its SLO leaves for the iterations that are left; `realised`: against what they take
        alone by what was seen.
        """
        spec = self.spec
        alone_s = spec.iterations * spec.profile.solo_s
        if realised:
            alone_s = self.seen_s + self.iterations_left * self.recent_solo_s
        return spec.slo * alone_s - self.elapsed_s(now_s)

    def budget_to_share_s(self, now_s: float) -> float:
        """The part of its budget that others may use: iterations that were shorter than declared
        leave none.

        So a job stays within its SLO against the lengths that it really has, as far as the order of
        a plan gets shorter with them.
        """
        spec = self.spec
        alone_s = self.seen_s + self.iterations_left * spec.profile.solo_s
        budget_s = min(self.budget_s(now_s), spec.slo * alone_s - self.elapsed_s(now_s))
        if spec.slo_scope == "job":
            return budget_s
        return min(
            budget_s,
            self.iterations_left * self.iteration_bound_s - max(self.iteration_s(now_s), 0.0),
        )

    @property
    def iteration_bound_s(self) -> float:
        """What one iteration may take, as long as it is; infinite where its SLO bounds the whole
        job only.
        """
        scope = self.spec.slo_scope
        return self.spec.slo * self.profile.solo_s if scope == "iteration" else math.inf

    def iteration_s(self, now_s: float) -> float:
        """How long the running iteration takes so far; below 0 in the sync before it. One that a
        move broke is over its bound whatever comes, so no time of it counts: else all would be
        ordered to shorten what is lost already, and break the iterations of others.
        """
        if self.moved_at == self.iterations_done:
            return -math.inf
        return self.elapsed_s(now_s) - self.iteration_began_s

    def end_iteration(self, now_s: float) -> None:
        """Its train phase has ended; the iteration ends with the sync."""
        self.next_phase = Phase.ROLLOUT
        self.iterations_done += 1
        self.free_s = now_s + self.sync_s
        began_s, self.iteration_began_s = self.iteration_began_s, self.elapsed_s(self.free_s)
        bound_s = self.spec.slo * self.profile.solo_s * (1 + _TOLERANCE)
        self.iterations_over += self.iteration_began_s - began_s > bound_s
        self.iteration_seen_s = self.seen_s - self.sync_s

    @property
    def may_move(self) -> bool:
        """Whether its SLO bears a move. One that bounds iterations bears a broken one in
        `ITERATIONS_PER_MOVE`, so there are as many since the last move, and as many to come.
        """
        least = min(self.iterations_done - self.moved_at, self.iterations_left)
        return self.spec.slo_scope == "job" or least >= ITERATIONS_PER_MOVE

    @property
    def recent_solo_s(self) -> float:
        """One iteration alone, by what was seen lately."""
        profile = self.profile
        rollout_s, train_s = self.recent_rollout.lately_s, self.recent_train.lately_s
        rollout_s = profile.rollout_s if rollout_s is None else rollout_s
        return rollout_s + (profile.train_s if train_s is None else train_s) + profile.sync_s

    def phase_s(self, phase: Phase, fleet: FleetView) -> float:
        """At worst, on the nodes where it is placed."""
        assert self.placement is not None
        train_nodes = len(self.placement.train_nodes)
        if phase is Phase.TRAIN:
            return fleet.train_s(self.profile, train_nodes)
        if self.is_local:
            return fleet.local_rollout_s(self.profile, train_nodes)
        return self.profile.rollout_s

    @property
    def is_local(self) -> bool:
        """All phases on train nodes: then there is nothing to sync over the link."""
        assert self.placement is not None
        return self.placement.rollout_nodes == self.placement.train_nodes

    @property
    def sync_s(self) -> float:
        return 0.0 if self.is_local else self.profile.sync_s

    def observe(self, phase: Phase, work_s: float) -> None:
        """One phase ended that would take `work_s` on the nodes of its profile."""
        self.seen_s += work_s + (self.spec.profile.sync_s if phase is Phase.TRAIN else 0.0)
        (self.recent_train if phase is Phase.TRAIN else self.recent_rollout).observe(work_s)

    def drifted(
        self, tolerance: float, headroom: float, *, both_ways: bool = False
    ) -> JobProfile | None:
        """A profile with room for what was seen lately, if that is more than placement goes by (or,
        `both_ways`, much less).
        """
        profile = self.profile
        rollout_s, train_s = self.recent_rollout.lately_s, self.recent_train.lately_s
        if rollout_s is None or train_s is None:
            return None
        over = max(rollout_s / profile.rollout_s, train_s / profile.train_s)
        under = min(rollout_s / profile.rollout_s, train_s / profile.train_s)
        if over > 1 + tolerance:
            return replace(
                profile,
                rollout_s=max(profile.rollout_s, rollout_s * (1 + headroom)),
                train_s=max(profile.train_s, train_s * (1 + headroom)),
            )
        if both_ways and under * (1 + headroom) ** 2 < 1:
            room = 1 + headroom
            return replace(
                profile,
                rollout_s=min(profile.rollout_s, rollout_s * room),
                train_s=min(profile.train_s, train_s * room),
            )
        return None
