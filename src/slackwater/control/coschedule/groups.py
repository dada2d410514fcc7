"""Groups of jobs that share nodes, as the co-scheduler runs them: who is in, what they wait for,
which order they keep.
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

# A newcomer whose place in the cycle would break a member's SLO waits for a better moment; after
# two cycles all were seen.
_PATIENCE = 2.0
_NO_LOSS = 1e-6


@dataclass(slots=True)
class _Group:
    ordering: Ordering
    jobs: dict[JobId, JobState] = field(default_factory=dict)
    waiting: dict[JobId, WaitingPhase] = field(default_factory=dict)
    pending: dict[JobId, float] = field(default_factory=dict)  # loaded, since when
    plan: GroupPlan | None = None
    worst_iteration_s: dict[JobId, float] = field(
        default_factory=dict
    )  # known until members, plan or profiles change


class Groups:
    """All groups, and the requests that wait in them."""

    def __init__(self, config: CoScheduleConfig, fleet: FleetView, permits: Permits) -> None:
        self._config = config
        self._fleet = fleet
        self._permits = permits
        self._groups: dict[GroupId, _Group] = {}
        self._users: dict[NodeId, dict[GroupId, int]] = {}  # by node, whichever part of it
        self.misfits: dict[JobId, JobState] = {}  # whom no moment let in that breaks no iteration

    def enter(self, state: JobState) -> None:
        """A job was placed; it takes part in the order once its state is loaded."""
        placement = state.placement
        assert placement is not None
        group = self._groups.get(placement.group)
        if group is None:
            group = _Group(self._config.new_ordering(partial(self._standing, placement.group)))
            self._groups[placement.group] = group
        group.jobs[state.spec.job] = state
        group.worst_iteration_s = {}
        for place in {*placement.rollout_nodes, *placement.train_nodes}:
            users = self._users.setdefault(node_of(place), {})
            users[placement.group] = users.get(placement.group, 0) + 1

    def plan(self, group_id: GroupId, plan: GroupPlan, now_s: float, *, joining: bool) -> None:
        """A group's new plan; with a member still loading it waits for that one."""
        group = self._groups[group_id]
        group.plan = plan
        group.worst_iteration_s = {}
        if not joining:
            self._adopt(group, now_s)

    def join(self, state: JobState, now_s: float) -> None:
        """A job's state is loaded: it takes part, and asks for its first rollout, as soon as that
        costs no member its SLO.
        """
        assert state.placement is not None
        state.wake(now_s)
        group = self._groups[state.placement.group]
        group.pending[state.spec.job] = now_s
        self._take_in(group, now_s)

    def is_pending(self, state: JobState) -> bool:
        """Whether it waits to take part."""
        assert state.placement is not None
        return state.spec.job in self._groups[state.placement.group].pending

    def _take_in(self, group: _Group, now_s: float) -> None:
        for job, since_s in list(group.pending.items()):
            state = group.jobs[job]
            state.joined = True
            members = self._members(group, now_s)
            bounded = any(member.bound_s < math.inf for member in members)
            if len(members) > 1 and (bounded or state.clock_s is None):
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
        """A member has nothing to do for a while: nobody waits for its turn. With its next request
        it takes part again.
        """
        assert state.placement is not None and state.joined
        self._groups[state.placement.group].ordering.leave(state.spec.job)
        state.joined = False
        state.rest()

    def leave(self, state: JobState) -> None:
        """A job finished, crashed or moves on; its permit is back already."""
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
        """A job's next phase waits for its turn."""
        placement = state.placement
        assert placement is not None
        nodes = placement.rollout_nodes if phase is Phase.ROLLOUT else placement.train_nodes
        billions = state.profile.model_billions
        needs = self._permits.needs_switch(state.spec.job, phase, nodes)
        setup_s = self._config.switching.warm_s(billions) if needs else 0.0
        service_s = state.phase_s(phase, self._fleet)
        request = WaitingPhase(state.spec.job, phase, nodes, now_s, service_s, setup_s)
        self._groups[placement.group].waiting[state.spec.job] = request

    def waiting(self) -> list[WaitingPhase]:
        """All requests that wait."""
        return [request for group in self._groups.values() for request in group.waiting.values()]

    def is_wanted(self, node: NodeId) -> bool:
        """Whether a request waits for the node."""
        return any(
            overlap(node, place)
            for group in self._users.get(node_of(node), ())
            for request in self._groups[group].waiting.values()
            for place in request.nodes
        )

    def is_waiting(self, state: JobState) -> bool:
        """Whether it has asked for a permit and not got it."""
        assert state.placement is not None
        return state.spec.job in self._groups[state.placement.group].waiting

    def grant(self, group_id: GroupId, now_s: float, commands: list[Command]) -> None:
        """Add a permit for every phase of the group that may run now; a job's clock starts with its
        first.
        """
        group = self._groups.get(group_id)
        if group is not None and group.pending:
            self._take_in(group, now_s)
        while group is not None and group.waiting:
            request = group.ordering.pick(group.waiting.values(), self._permits.is_free, now_s)
            if request is None:
                return
            state = group.jobs[request.job]
            del group.waiting[request.job]
            group.ordering.started(request.job, request.phase, request.nodes)
            if state.clock_s is None:
                state.clock_s = now_s
            commands.append(self._permits.grant(request, state.epoch, now_s))

    def members_on(self, node: NodeId) -> list[JobState]:
        """All jobs that run there phase by phase."""
        return [
            state
            for group in self.using((node,))
            for state in self._groups[group].jobs.values()
            if state.joined and state.placement is not None
            if state.placement.uses(node)
        ]

    def using(self, nodes: tuple[NodeId, ...]) -> list[GroupId]:
        """Groups that have a stake in one of the nodes, or in another part of one."""
        users: dict[GroupId, int] = {}
        for node in nodes:
            users |= self._users.get(node_of(node), {})
        return list(users)

    def shares(self, state: JobState) -> bool:
        """Whether its group has other members."""
        assert state.placement is not None
        return len(self._groups[state.placement.group].jobs) > 1

    def revised(self, state: JobState) -> None:
        """A member's profile changed."""
        assert state.placement is not None
        self._groups[state.placement.group].worst_iteration_s = {}

    def worst_iteration_s(self, state: JobState) -> float:
        """At most so long does one iteration take in its group when every phase takes its worst."""
        assert state.placement is not None
        group = self._groups[state.placement.group]
        if not group.worst_iteration_s:
            period_s, plan = self._worst_period_s(group), group.plan
            group.worst_iteration_s = {
                job: period_s if plan is None else period_s / max(plan.rounds(job), 1)
                for job in group.jobs
            }
        return group.worst_iteration_s[state.spec.job]

    def mates(self, state: JobState) -> list[JobState]:
        """The others of its group."""
        assert state.placement is not None
        return [
            mate
            for mate in self._groups[state.placement.group].jobs.values()
            if mate.spec.job != state.spec.job
        ]

    def coming_iteration_s(self, state: JobState) -> float:
        """So long an iteration takes in its group when nobody waits more than the fullest node
        makes him.
        """
        assert state.placement is not None
        group = self._groups[state.placement.group]
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

    def waits_for(
        self, nodes: tuple[NodeId, ...], but: JobId, phases: tuple[Phase, ...] = tuple(Phase)
    ) -> bool:
        """Whether one of these phases of another job waits for one of the nodes."""
        return any(
            request.phase in phases
            and any(overlap(node, place) for node in nodes for place in request.nodes)
            for group_id in self.using(nodes)
            for request in self._groups[group_id].waiting.values()
            if request.job != but
        )

    def keeps_waiting(self, state: JobState) -> bool:
        """Whether another member of its group waits, be it for nodes or for its turn."""
        assert state.placement is not None
        group = self._groups[state.placement.group]
        return bool(group.pending) or any(job != state.spec.job for job in group.waiting)

    def _adopt(self, group: _Group, now_s: float) -> None:
        group.ordering.adopt(self._members(group, now_s), group.plan)

    def _standing(self, group_id: GroupId, now_s: float) -> list[LoadedJob]:
        return self._members(self._groups[group_id], now_s)

    def _members(self, group: _Group, now_s: float) -> list[LoadedJob]:
        return [self._member(state, now_s) for state in group.jobs.values() if state.joined]

    def _member(self, state: JobState, now_s: float) -> LoadedJob:
        placement = state.placement
        assert placement is not None
        permit = self._permits.held_by(state.spec.job)
        next_phase = state.next_phase
        if permit is None:
            running_s = max(state.free_s - now_s, 0.0)
        else:
            next_phase = Phase.TRAIN if permit.phase is Phase.ROLLOUT else Phase.ROLLOUT
            left_s = self.phase_end_s(state, permit.phase, permit.started_s) - now_s
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
            state.clock_s is not None,
            bound_s=state.iteration_bound_s,
            iteration_s=state.iteration_s(now_s),
        )

    def rolls_out_for_s(self, state: JobState, now_s: float) -> float:
        """How much longer its rollout takes, by what was seen lately; 0 if it has none running."""
        permit = self._permits.held_by(state.spec.job)
        if permit is None or permit.phase is not Phase.ROLLOUT:
            return 0.0
        lately_s = state.recent_rollout.lately_s
        whole_s = state.phase_s(Phase.ROLLOUT, self._fleet) if lately_s is None else lately_s
        return max(permit.started_s + whole_s - now_s, 0.0)

    def phase_end_s(self, state: JobState, phase: Phase, started_s: float) -> float:
        """When a phase that began at `started_s` ends at worst."""
        return started_s + state.phase_s(phase, self._fleet)

    def check_integrity(self) -> None:
        """Every waiting or ordered job is a member; nobody waits who runs, nor for nodes that are
        free and nobody else's.
        """
        for group_id, group in self._groups.items():
            assert group.jobs, f"group {group_id} is empty"
            for job, request in group.waiting.items():
                assert job in group.jobs and request.job == job
                assert self._permits.held_by(job) is None, f"{job} waits while it runs"
                alone = len(group.jobs) == 1
                assert not (alone and self._permits.is_free(request)), f"{job} waits for nobody"
            for job in group.pending:
                assert not group.jobs[job].joined and job not in group.waiting
            for job, state in group.jobs.items():
                assert state.placement is not None and state.placement.group == group_id
                assert state.joined == (job in group.ordering.jobs()), f"{job}: order out of step"
