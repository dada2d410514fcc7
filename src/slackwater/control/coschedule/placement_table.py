"""Where jobs are placed: what a placement policy answers becomes starts, moves and rent, and freed
nodes become permits.
"""

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
    """The jobs that have a place, and the nodes that are rented for them; `jobs` are all that are
    known.
    """

    def __init__(
        self,
        policy: PlacementPolicy,
        jobs: Mapping[JobId, JobState],
        groups: Groups,
        permits: Permits,
        guests: UnprofiledJobs,
    ) -> None:
        self._policy = policy
        self._jobs = jobs
        self._groups = groups
        self._permits = permits
        self._guests = guests
        self.placed: dict[JobId, JobState] = {}
        self._by_size: dict[tuple[int, int], dict[JobId, JobState]] = {}
        self.rented: set[NodeId] = set()

    def alike(self, state: JobState) -> Collection[JobState]:
        """The placed jobs that have parts of nodes of the same size: those that it can share
        with.
        """
        return self._of_size(state).values()

    def _of_size(self, state: JobState) -> dict[JobId, JobState]:
        return self._by_size.setdefault(state.size, {})

    def apply(self, placements: Sequence[Placement], now_s: float) -> list[Command]:
        """Carry out what a policy answered: new placements, moves, plans, and nodes rented or given
        back.
        """
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
                runs = state.clock_s is not None
                freed.extend(self.withdraw(state, now_s))
                if runs:  # A move is on the job's own time, and breaks an iteration.
                    state.clock_s, state.moved_at = now_s, state.iterations_done
            fresh.append((state, placement))
        commands.extend(self._settle_rent())
        commands.extend(self._start(state, placement) for state, placement in fresh)
        joining = {placement.group for _, placement in fresh}
        for group, plan in {p.group: p.plan for p in placements if p.plan is not None}.items():
            self._groups.plan(group, plan, now_s, joining=group in joining)
        commands.extend(self.grant(tuple(freed), now_s))
        for group in dict.fromkeys(p.group for p in placements if p.group not in joining):
            self._groups.grant(group, now_s, commands)
        return commands

    def withdraw(self, state: JobState, now_s: float) -> tuple[NodeId, ...]:
        """Take a placed job off its nodes and out of its group; its clock stands still."""
        assert state.placement is not None
        nodes = tuple({*state.placement.rollout_nodes, *state.placement.train_nodes})
        permit = self._permits.held_by(state.spec.job)
        if permit is not None:
            self._permits.take_back(permit)
        self._groups.leave(state)
        del self.placed[state.spec.job], self._of_size(state)[state.spec.job]
        state.placement = None
        state.spent_s, state.clock_s = state.elapsed_s(now_s), None
        state.seen_s = state.iteration_seen_s  # the iteration that runs is made again
        return tuple(sorted(nodes))

    def _start(self, state: JobState, placement: Placement) -> StartJob:
        state.placement = placement
        state.status = JobStatus.PLACED
        state.reason, state.displaced = placement.reason, ""
        state.epoch += 1
        state.next_phase = Phase.ROLLOUT
        self.placed[placement.job] = self._of_size(state)[placement.job] = state
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

    def _settle_rent(self) -> list[Command]:
        gone, come = self._policy.rent_changes()
        self.rented.difference_update(gone)
        self.rented.update(come)
        commands: list[Command] = []
        if gone:
            self._permits.forget(n for n in gone if self._permits.holder_of(n) not in self._guests)
            commands.append(ReturnNodes(tuple(sorted(gone))))
        if come:
            commands.append(RentNodes(tuple(sorted(come))))
        return commands

    def grant(self, nodes: tuple[NodeId, ...], now_s: float) -> list[Command]:
        """Permits for whoever waited for one of the nodes."""
        commands: list[Command] = []
        for group in self._groups.using(nodes):
            self._groups.grant(group, now_s, commands)
        return commands

    def current(self, job: JobId, epoch: int) -> JobState | None:
        """The job, if it is placed and the message is of this placement."""
        state = self.placed.get(job)
        return state if state is not None and state.epoch == epoch else None

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert self.rented == set(self._policy.rented()), "rent is out of step"
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
