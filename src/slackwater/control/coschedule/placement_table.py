"""Where jobs are placed: applies placements as starts, moves and rent, and grants freed nodes."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from slackwater.control.coschedule.commands import (
    Command,
    RentNodes,
    ReturnNodes,
    StartJob,
    StopJob,
)
from slackwater.control.coschedule.groups import Groups
from slackwater.control.coschedule.job_state import JobState, JobStatus
from slackwater.control.coschedule.permits import Permits
from slackwater.control.coschedule.unprofiled_jobs import UnprofiledJobs
from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase, Placement
from slackwater.policy.placement.interface import PlacementPolicy


class PlacementTable:
    """The placed jobs among all `jobs`, and the nodes that are rented for them."""

    def __init__(
        self,
        policy: PlacementPolicy,
        jobs: Mapping[JobId, JobState],
        groups: Groups,
        permits: Permits,
        unprofiled: UnprofiledJobs,
    ) -> None:
        self._policy = policy
        self._jobs = jobs
        self._groups = groups
        self._permits = permits
        self._unprofiled = unprofiled
        self.placed: dict[JobId, JobState] = {}
        self._by_size: defaultdict[tuple[int, int], dict[JobId, JobState]] = defaultdict(dict)
        self.rented: set[NodeId] = set()

    def jobs_of_same_size(self, state: JobState) -> Collection[JobState]:
        """The placed jobs with parts of nodes of the same size: it can share only with those."""
        return self._by_size[state.size].values()

    def apply(self, placements: Sequence[Placement], now_s: float) -> list[Command]:
        """Apply new placements, moves and plans, and rent and return nodes."""
        commands: list[Command] = []
        freed: list[NodeId] = []
        fresh: list[tuple[JobState, Placement]] = []
        for placement in placements:
            state = self._jobs[placement.job]
            old = state.placement
            if old is not None and _same_nodes(old, placement):
                state.placement = placement
                continue
            if old is not None:
                commands.append(StopJob(placement.job, state.epoch, True, placement.reason))
                runs = state.clock_since_s is not None
                freed.extend(self.withdraw(state, now_s))
                if runs:  # A move counts on the job's SLO clock, and breaks an iteration.
                    state.clock_since_s, state.moved_at_iteration = now_s, state.iterations_done
            fresh.append((state, placement))
        commands.extend(self._apply_rent_changes())
        commands.extend(self._start(state, placement) for state, placement in fresh)
        joining = {placement.group for _, placement in fresh}
        for group, plan in {p.group: p.plan for p in placements if p.plan is not None}.items():
            self._groups.plan(group, plan, now_s, joining=group in joining)
        commands.extend(self.grant(tuple(freed), now_s))
        for group in dict.fromkeys(p.group for p in placements if p.group not in joining):
            commands.extend(self._groups.grant(group, now_s))
        return commands

    def withdraw(self, state: JobState, now_s: float) -> tuple[NodeId, ...]:
        """Take a placed job off its nodes and out of its group; stop its SLO clock."""
        assert state.placement is not None
        nodes = tuple({*state.placement.rollout_nodes, *state.placement.train_nodes})
        permit = self._permits.find_by_job(state.spec.job)
        if permit is not None:
            self._permits.release(permit)
        self._groups.leave(state)
        del self.placed[state.spec.job], self._by_size[state.size][state.spec.job]
        state.placement = None
        state.spent_s, state.clock_since_s = state.clock_time_s(now_s), None
        state.observed_s = state.observed_before_s  # the running iteration is repeated
        return tuple(sorted(nodes))

    def _start(self, state: JobState, placement: Placement) -> StartJob:
        state.placement = placement
        state.status = JobStatus.PLACED
        state.reason, state.displaced_reason = placement.reason, ""
        state.epoch += 1
        state.next_phase = Phase.ROLLOUT
        self.placed[placement.job] = self._by_size[state.size][placement.job] = state
        self._groups.enter(state)
        return StartJob(
            placement.job,
            state.epoch,
            placement.group,
            placement.rollout_nodes,
            placement.train_nodes,
            state.iterations_done,
            placement.strategy,
            placement.reason,
        )

    def _apply_rent_changes(self) -> list[Command]:
        returned, rented = self._policy.take_rent_changes()
        self.rented.difference_update(returned)
        self.rented.update(rented)
        commands: list[Command] = []
        if returned:
            # Unprofiled jobs run on nodes that no placed job rents.
            holders = self._permits.find_holder
            self._permits.forget(n for n in returned if holders(n) not in self._unprofiled)
            commands.append(ReturnNodes(tuple(sorted(returned))))
        if rented:
            commands.append(RentNodes(tuple(sorted(rented))))
        return commands

    def grant(self, nodes: tuple[NodeId, ...], now_s: float) -> list[Command]:
        """Grant permits to phases that wait for one of the nodes."""
        groups = self._groups.groups_on(nodes)
        return [command for group in groups for command in self._groups.grant(group, now_s)]

    def current(self, job: JobId, epoch: int) -> JobState | None:
        """The job, if its placement has this epoch; else the message came late."""
        state = self.placed.get(job)
        return state if state is not None and state.epoch == epoch else None

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert self.rented == set(self._policy.list_rented()), "rent is out of step"
        assert sum(map(len, self._by_size.values())) == len(self.placed), "sizes are out of step"
        for job, state in self.placed.items():
            assert state.placement is not None
            nodes = (*state.placement.rollout_nodes, *state.placement.train_nodes)
            assert self.rented.issuperset(nodes), f"{job} is pinned to a node nobody pays for"


def _same_nodes(old: Placement, new: Placement) -> bool:
    return (
        old.group == new.group
        and old.rollout_nodes == new.rollout_nodes
        and old.train_nodes == new.train_nodes
    )
