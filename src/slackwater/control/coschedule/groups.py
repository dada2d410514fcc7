"""Co-execution groups: which jobs share nodes, which of their phases wait, and in which order they
run.
"""

import math
from dataclasses import dataclass, field
from functools import partial

from slackwater.control.coschedule.commands import Command
from slackwater.control.coschedule.config import CoScheduleConfig
from slackwater.control.coschedule.job_state import JobState
from slackwater.control.coschedule.permits import Permits
from slackwater.model.ids import GroupId, JobId, NodeId
from slackwater.model.placement import GroupPlan, Phase, node_of, overlap
from slackwater.policy.ordering.plan_alignment import worst_period_s
from slackwater.policy.ordering.priority import LoadedJob, Ordering, WaitingPhase
from slackwater.policy.placement.fleet import FleetView

# A new member that would break another's SLO by joining now waits for a better moment of the cycle.
# After two cycles it has seen all of them.
_PATIENCE = 2.0  # cycles
_NO_LOSS = 1e-6


@dataclass(slots=True)
class _Group:
    ordering: Ordering
    jobs: dict[JobId, JobState] = field(default_factory=dict)
    waiting: dict[JobId, WaitingPhase] = field(default_factory=dict)
    pending: dict[JobId, float] = field(default_factory=dict)  # loaded but not joined, since when
    plan: GroupPlan | None = None
    # A cache: empty after members, plan or profiles change.
    worst_iteration_s: dict[JobId, float] = field(default_factory=dict)


class Groups:
    """All groups, and the phases that wait in them."""

    def __init__(self, config: CoScheduleConfig, fleet: FleetView, permits: Permits) -> None:
        self._config = config
        self._fleet = fleet
        self._permits = permits
        self._groups: dict[GroupId, _Group] = {}
        self._users: dict[NodeId, dict[GroupId, int]] = {}  # by whole node: jobs of each group
        self.misfits: dict[JobId, JobState] = {}  # no moment to join breaks no bounded iteration

    def enter(self, state: JobState) -> None:
        """Add a job that was placed; it takes part in the order once its state is loaded."""
        placement = state.placement
        assert placement is not None
        group = self._groups.get(placement.group)
        if group is None:
            group = _Group(self._config.new_ordering(partial(self._members_by_id, placement.group)))
            self._groups[placement.group] = group
        group.jobs[state.spec.job] = state
        group.worst_iteration_s = {}
        for place in {*placement.rollout_nodes, *placement.train_nodes}:
            users = self._users.setdefault(node_of(place), {})
            users[placement.group] = users.get(placement.group, 0) + 1

    def plan(self, group_id: GroupId, plan: GroupPlan, now_s: float, *, joining: bool) -> None:
        """Give a group a new plan; with a joining member it takes effect when that has joined."""
        group = self._groups[group_id]
        group.plan = plan
        group.worst_iteration_s = {}
        if not joining:
            group.ordering.adopt(self._members(group, now_s), group.plan)

    def join(self, state: JobState, now_s: float) -> None:
        """The job's state is loaded: it takes part, and requests its first rollout, as soon as that
        costs no member its SLO.
        """
        state.wake(now_s)
        group = self._group_of(state)
        group.pending[state.spec.job] = now_s
        self._join_pending(group, now_s)

    def is_pending(self, state: JobState) -> bool:
        """Whether its state is loaded and it has not joined its group's order yet."""
        return state.spec.job in self._group_of(state).pending

    def _join_pending(self, group: _Group, now_s: float) -> None:
        for job, since_s in list(group.pending.items()):
            state = group.jobs[job]
            state.joined = True
            members = self._members(group, now_s)
            bounded = any(member.bound_s < math.inf for member in members)
            if len(members) > 1 and (bounded or state.clock_since_s is None):
                loss_s, period_s = group.ordering.joining_loss_s(members, group.plan)
                waited = now_s - since_s >= _PATIENCE * period_s
                if loss_s > _NO_LOSS * period_s and (bounded or not waited):
                    state.joined = False
                    if waited:
                        group.pending[job] = now_s
                        self.misfits[job] = state
                    continue
            del group.pending[job]
            group.ordering.adopt(members, group.plan)
            self.request(state, state.next_phase, now_s)

    def rest(self, state: JobState) -> None:
        """Let the order skip a member that asks for nothing, until its next request."""
        assert state.joined
        self._group_of(state).ordering.leave(state.spec.job)
        state.joined = False
        state.rest()

    def leave(self, state: JobState) -> None:
        """Remove a job that finished, crashed or moves; its permit was released before."""
        placement = state.placement
        assert placement is not None
        job = state.spec.job
        group = self._groups[placement.group]
        group.ordering.leave(job)
        group.waiting.pop(job, None)
        group.pending.pop(job, None)
        del group.jobs[job]
        group.worst_iteration_s = {}
        if not group.jobs:
            del self._groups[placement.group]
        for place in {*placement.rollout_nodes, *placement.train_nodes}:
            node = node_of(place)
            users = self._users[node]
            users[placement.group] -= 1
            if not users[placement.group]:
                del users[placement.group]
            if not users:
                del self._users[node]
        state.joined = False

    def request(self, state: JobState, phase: Phase, now_s: float) -> None:
        """Queue the job's next phase."""
        placement = state.placement
        assert placement is not None
        nodes = placement.rollout_nodes if phase is Phase.ROLLOUT else placement.train_nodes
        billions = state.profile.model_billions
        needs = self._permits.needs_switch(state.spec.job, phase, nodes)
        setup_s = self._config.switching.warm_s(billions) if needs else 0.0
        service_s = state.phase_s(phase, self._fleet)
        request = WaitingPhase(state.spec.job, phase, nodes, now_s, service_s, setup_s)
        self._groups[placement.group].waiting[state.spec.job] = request

    def has_request_on(self, node: NodeId) -> bool:
        """Whether a phase waits for the node."""
        return any(
            overlap(node, place)
            for group in self._users.get(node_of(node), ())
            for request in self._groups[group].waiting.values()
            for place in request.nodes
        )

    def is_waiting(self, state: JobState) -> bool:
        """Whether it has requested a permit and not got it."""
        return state.spec.job in self._group_of(state).waiting

    def grant(self, group_id: GroupId, now_s: float) -> list[Command]:
        """Grant a permit to every phase of the group that may run now. A job's SLO clock starts
        with its first permit.
        """
        granted: list[Command] = []
        group = self._groups.get(group_id)
        if group is not None and group.pending:
            self._join_pending(group, now_s)
        while group is not None and group.waiting:
            request = group.ordering.pick(group.waiting.values(), self._permits.is_free, now_s)
            if request is None:
                break
            state = group.jobs[request.job]
            del group.waiting[request.job]
            group.ordering.record_start(request.job, request.phase, request.nodes)
            if state.clock_since_s is None:
                state.clock_since_s = now_s
            granted.append(self._permits.grant(request, state.epoch, now_s))
        return granted

    def members_on(self, node: NodeId) -> list[JobState]:
        """All jobs that take part in an order and have phases on the node."""
        return [
            state
            for group in self.groups_on((node,))
            for state in self._groups[group].jobs.values()
            if state.joined and state.placement is not None
            if state.placement.uses(node)
        ]

    def groups_on(self, nodes: tuple[NodeId, ...]) -> list[GroupId]:
        """Groups with jobs on one of the nodes, or on any part of one."""
        users: dict[GroupId, int] = {}
        for node in nodes:
            users |= self._users.get(node_of(node), {})
        return list(users)

    def shares(self, state: JobState) -> bool:
        """Whether its group has other members."""
        return len(self._group_of(state).jobs) > 1

    def record_profile_change(self, state: JobState) -> None:
        """Phases of the job take longer or shorter than before."""
        self._group_of(state).worst_iteration_s = {}

    def worst_iteration_s(self, state: JobState) -> float:
        """The longest that one iteration takes in its group at worst-case lengths of all phases."""
        group = self._group_of(state)
        if not group.worst_iteration_s:
            period_s, plan = self._worst_period_s(group), group.plan
            group.worst_iteration_s = {
                job: period_s if plan is None else period_s / max(plan.rounds(job), 1)
                for job in group.jobs
            }
        return group.worst_iteration_s[state.spec.job]

    def mates(self, state: JobState) -> list[JobState]:
        """The other jobs of its group."""
        members = self._group_of(state).jobs
        return [member for job, member in members.items() if job != state.spec.job]

    def next_iteration_s(self, state: JobState) -> float:
        """How long an iteration takes in its group if jobs only wait for the fullest node."""
        group = self._group_of(state)
        if group.plan is not None:
            return self.worst_iteration_s(state)
        loads_s: dict[NodeId, float] = {}
        for member in group.jobs.values():
            assert member.placement is not None
            for phase, nodes in (
                (Phase.ROLLOUT, member.placement.rollout_nodes),
                (Phase.TRAIN, member.placement.train_nodes),
            ):
                for node in nodes:
                    loads_s[node] = loads_s.get(node, 0.0) + member.phase_s(phase, self._fleet)
        longest_s = max(member.profile.solo_s for member in group.jobs.values())
        return max(longest_s, *loads_s.values())

    def _worst_period_s(self, group: _Group) -> float:
        lengths_s = {
            (job, phase): member.phase_s(phase, self._fleet)
            for job, member in group.jobs.items()
            for phase in (Phase.ROLLOUT, Phase.TRAIN)
        }
        syncs_s = {job: member.sync_s for job, member in group.jobs.items()}
        if group.plan is None:
            return sum(lengths_s.values()) + sum(syncs_s.values())
        return worst_period_s(group.plan, lengths_s, syncs_s)

    def has_request_for(
        self, nodes: tuple[NodeId, ...], other_than: JobId, phases: tuple[Phase, ...] = tuple(Phase)
    ) -> bool:
        """Whether another job waits with one of these phases for one of the nodes."""
        return any(
            request.phase in phases
            and any(overlap(node, place) for node in nodes for place in request.nodes)
            for group_id in self.groups_on(nodes)
            for request in self._groups[group_id].waiting.values()
            if request.job != other_than
        )

    def has_other_waiters(self, state: JobState) -> bool:
        """Whether another member of its group waits, for nodes or for its turn."""
        group = self._group_of(state)
        return bool(group.pending) or any(job != state.spec.job for job in group.waiting)

    def _group_of(self, state: JobState) -> _Group:
        assert state.placement is not None
        return self._groups[state.placement.group]

    def _members_by_id(self, group_id: GroupId, now_s: float) -> list[LoadedJob]:
        return self._members(self._groups[group_id], now_s)

    def _members(self, group: _Group, now_s: float) -> list[LoadedJob]:
        return [self._member(state, now_s) for state in group.jobs.values() if state.joined]

    def _member(self, state: JobState, now_s: float) -> LoadedJob:
        placement = state.placement
        assert placement is not None
        permit = self._permits.find_by_job(state.spec.job)
        next_phase = state.next_phase
        if permit is None:
            running_s = max(state.free_s - now_s, 0.0)
        else:
            next_phase = Phase.TRAIN if permit.phase is Phase.ROLLOUT else Phase.ROLLOUT
            left_s = permit.started_s + state.phase_s(permit.phase, self._fleet) - now_s
            running_s = max(left_s, 0.0) + (state.sync_s if permit.phase is Phase.TRAIN else 0.0)
        budget_s = state.budget_s(now_s, realised=self._config.slo_basis == "realised")
        return LoadedJob(
            state.spec.job,
            placement.rollout_nodes,
            placement.train_nodes,
            state.phase_s(Phase.ROLLOUT, self._fleet),
            state.phase_s(Phase.TRAIN, self._fleet),
            state.sync_s,
            next_phase,
            running_s,
            budget_s,
            state.iterations_left,
            state.clock_since_s is not None,
            bound_s=state.iteration_bound_s,
            iteration_s=state.iteration_s(now_s),
            target_s=state.iteration_target_s,
        )

    def remaining_rollout_s(self, state: JobState, now_s: float) -> float:
        """How much longer its running rollout takes by recent lengths; 0 if none runs."""
        permit = self._permits.find_by_job(state.spec.job)
        if permit is None or permit.phase is not Phase.ROLLOUT:
            return 0.0
        length_s = state.recent_rollout.mean_s
        if length_s is None:
            length_s = state.phase_s(Phase.ROLLOUT, self._fleet)
        return max(permit.started_s + length_s - now_s, 0.0)

    def check_integrity(self) -> None:
        """Check that waiting and ordered jobs are members, that no job waits while it runs, and
        that none waits for free nodes in a group of its own.
        """
        for group_id, group in self._groups.items():
            assert group.jobs, f"group {group_id} is empty"
            for job, request in group.waiting.items():
                assert job in group.jobs and request.job == job
                assert self._permits.find_by_job(job) is None, f"{job} waits while it runs"
                single = len(group.jobs) == 1
                assert not (single and self._permits.is_free(request)), f"{job} waits for nobody"
            for job in group.pending:
                assert not group.jobs[job].joined and job not in group.waiting
            for job, state in group.jobs.items():
                assert state.placement is not None and state.placement.group == group_id
                assert state.joined == (job in group.ordering.jobs()), f"{job}: order out of step"
