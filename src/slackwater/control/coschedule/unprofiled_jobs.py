"""Jobs whose cycle is not known yet. They run phase by phase on nodes that no other job waits for
(PlexRL 4.3, unknown jobs).

An unprofiled job is in no group and no plan. It has its nodes to itself in every phase, so the
length of a phase, or the sum of its pieces if it was preempted, is the job's own. Where a member of
a group waits, it is preempted: a rollout at once, training after the step that runs. It trains only
where members can bear to wait for such a step. If members wait all the time, nodes are reserved for
its next phase, provided that the members can bear that: else it would never run.
"""

from dataclasses import dataclass, field

from slackwater.control.coschedule.commands import GrantPermit
from slackwater.control.coschedule.groups import Groups
from slackwater.control.coschedule.permits import Permit, Permits
from slackwater.control.coschedule.slo_guard import SloGuard
from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobProfile
from slackwater.model.node import Role
from slackwater.model.placement import Phase, overlap
from slackwater.policy.ordering.priority import WaitingPhase
from slackwater.policy.placement.fleet import FleetView


@dataclass(slots=True)
class _UnprofiledJob:
    nodes: dict[Phase, int]
    places: dict[Phase, list[NodeId]]  # nodes, or parts of them, that it could have
    next_phase: Phase = Phase.ROLLOUT
    waits_since_s: float | None = None
    uses_reserved_nodes: bool = False
    step_s: float | None = None  # its longest stretch of training that could not be preempted
    last_nodes: dict[Phase, tuple[NodeId, ...]] = field(default_factory=dict)  # may have its state


class UnprofiledJobs:
    """All unprofiled jobs, and the phases that they wait for."""

    def __init__(self, fleet: FleetView, permits: Permits, groups: Groups, guard: SloGuard) -> None:
        self._fleet = fleet
        self._permits = permits
        self._groups = groups
        self._guard = guard
        self._jobs: dict[JobId, _UnprofiledJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: JobId | None) -> bool:
        return job in self._jobs

    def never_reason(self, demand: JobProfile) -> str | None:
        """Why a job with this demand can never run here, or None if it can."""
        fleet = self._fleet
        for pool, nodes in (
            (fleet.rollout, demand.rollout_nodes),
            (fleet.train, demand.train_nodes),
        ):
            if nodes > pool.max_nodes:
                what = f"needs {nodes} {pool.role} nodes and the pool has {pool.max_nodes}"
                return f"{what}; ask for fewer"
        return None

    def enter(self, job: JobId, demand: JobProfile) -> None:
        """Add a job with this demand."""
        fleet = self._fleet
        rollout_part, train_part = fleet.parts(demand)
        self._jobs[job] = _UnprofiledJob(
            {Phase.ROLLOUT: demand.rollout_nodes, Phase.TRAIN: demand.train_nodes},
            {
                Phase.ROLLOUT: fleet.list_places(Role.ROLLOUT, rollout_part),
                Phase.TRAIN: fleet.list_places(Role.TRAIN, train_part),
            },
        )

    def leave(self, job: JobId) -> None:
        """Remove a job that has a profile now, or is gone; its permit was released before."""
        self._jobs.pop(job, None)
        self._permits.drop_reservation(job)

    def next_phase(self, job: JobId) -> Phase:
        return self._jobs[job].next_phase

    def request(self, job: JobId, phase: Phase, now_s: float) -> None:
        """Queue its next phase."""
        state = self._jobs[job]
        if phase is state.next_phase and state.waits_since_s is None:
            state.waits_since_s = now_s

    def has_request_for(self, nodes: tuple[NodeId, ...], other_than: JobId) -> bool:
        """Whether another unprofiled job waits for one of the nodes."""
        return any(
            state.waits_since_s is not None
            and job != other_than
            and any(node.startswith(state.next_phase) for node in nodes)
            for job, state in self._jobs.items()
        )

    def uses_reserved_nodes(self, job: JobId) -> bool:
        """Whether it runs on nodes that were reserved for it."""
        return self._jobs[job].uses_reserved_nodes

    def record_phase(self, job: JobId, permit: Permit, step_s: float) -> None:
        """Record a permit that ended; `step_s` is its longest stretch without a boundary."""
        state = self._jobs[job]
        state.uses_reserved_nodes, state.last_nodes[permit.phase] = False, permit.nodes
        if permit.phase is Phase.TRAIN:
            state.step_s = max(state.step_s or 0.0, step_s)

    def advance_phase(self, job: JobId, phase: Phase) -> None:
        """The phase is over: the other one is next."""
        self._jobs[job].next_phase = Phase.TRAIN if phase is Phase.ROLLOUT else Phase.ROLLOUT

    def grant(self, now_s: float) -> list[GrantPermit]:
        """Grant permits, longest wait first, on free nodes that no member of a group wants and
        whose members can bear a step of the job.
        """
        granted: list[GrantPermit] = []
        reserved = self._permits.reserved
        for since_s, job in self._waiting():
            state = self._jobs[job]
            nodes = self._free_nodes(job, state, now_s)
            if nodes is None:
                continue
            state.waits_since_s = None
            state.uses_reserved_nodes = any(reserved.get(node) == job for node in nodes)
            request = WaitingPhase(job, state.next_phase, nodes, since_s, 0.0, 0.0)
            granted.append(self._permits.grant(request, 0, now_s))
        return granted

    def reserve_nodes(self, now_s: float) -> None:
        """Reserve nodes whose members can bear such a phase for the job that has waited longest,
        unless some are reserved already.
        """
        if self._permits.reserved:
            return
        for since_s, job in self._waiting():
            state = self._jobs[job]
            phase = state.next_phase
            able = [
                node
                for node in state.places[phase]
                if self._guard.can_bear_unprofiled_phase(
                    self._groups.members_on(node), phase, now_s - since_s, now_s
                )
            ]
            if len(able) >= state.nodes[phase]:
                self._permits.reserve(able[: state.nodes[phase]], job)
                return

    def _waiting(self) -> list[tuple[float, JobId]]:
        """(Since when, job), longest wait first."""
        return sorted(
            (state.waits_since_s, job)
            for job, state in self._jobs.items()
            if state.waits_since_s is not None
        )

    def _free_nodes(
        self, job: JobId, state: _UnprofiledJob, now_s: float
    ) -> tuple[NodeId, ...] | None:
        """Nodes for its next phase, those with its state first: a load elsewhere would be measured
        as a part of the phase. None if there are too few.
        """
        reserved, phase, found = self._permits.reserved, state.next_phase, []
        before = state.last_nodes.get(phase, ())
        for node in sorted(state.places[phase], key=lambda node: node not in before):
            if not self._permits.is_idle(node):
                continue
            wanted = self._groups.has_request_on(node)
            free = not wanted and not any(overlap(node, other) for other in reserved)
            if free and phase is Phase.TRAIN:
                members = self._groups.members_on(node)
                free = self._guard.can_bear_step(members, state.step_s, now_s)
            if free or reserved.get(node) == job:
                found.append(node)
                if len(found) == state.nodes[phase]:
                    return tuple(found)
        return None

    def check_integrity(self) -> None:
        """Check that nodes are reserved only for unprofiled jobs that wait."""
        for node, job in self._permits.reserved.items():
            state = self._jobs.get(job)
            waits = state is not None and state.waits_since_s is not None
            assert waits, f"{node} is reserved for {job}, which is no unprofiled job that waits"
