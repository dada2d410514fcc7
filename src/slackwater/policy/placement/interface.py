"""The interface of all placement policies: which jobs share which nodes.

A policy is a deterministic state machine without I/O: it names the nodes it rents (`rollout-0`,
`train-3`, the lowest free number first) and gives them back when no job uses them. Whoever drives
it compares `list_rented()` before and after.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.placement import Placement, Refusal


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How a placed job stands: what it has still to do, and the time that its SLO leaves for it.

    `budget_s` is the time that its SLO leaves for the `iterations_left` (the running one counts
    whole), of which it lets others use little of what it won by iterations shorter than declared.
    `rollout_s` and `train_s` are what its phases took lately on the nodes of its profile, once
    there were some. It must stay where it is while it is not `may_move`.
    """

    job: JobId
    iterations_left: int
    budget_s: float
    rollout_s: float | None = None
    train_s: float | None = None
    may_move: bool = True


class PlacementPolicy(Protocol):
    """Which jobs share which nodes. `revise`, `isolate` and `rebalance` may answer with
    moves of jobs already placed.

    A placement that carries a plan replaces the plan of its whole group, from now on. A placement
    on the nodes that its job has already only brings that plan; on others it is a move, and the
    job's processes restart there. Whoever drives the policy calls `observe` just before each of
    `place`, `remove`, `revise`, `isolate` and `rebalance`, with the placed jobs of the size of the
    job that this is about: the others share nothing with it. Answers of one instant may be carried
    out together, the last of each job.
    """

    @property
    def name(self) -> str: ...

    def observe(self, progress: Sequence[JobProgress], waiting: Sequence[JobSpec] = ()) -> None:
        """How placed jobs stand now (those that are not named stand as told last), and which jobs
        want room, with the iterations that they have still to make.
        """
        ...

    def admission_order(self, waiting: Sequence[JobSpec]) -> Sequence[JobId]:
        """In which order those that wait (given in order of arrival) are tried when a job
        has left.
        """
        ...

    def place(self, job: JobSpec, now_s: float) -> Placement | Refusal:
        """Find nodes for an arriving job; nothing changes on a refusal."""
        ...

    def remove(self, job: JobId) -> None:
        """A job left. Its unshared nodes are given back; a rebalance finds what has become worth
        while.
        """
        ...

    def revise(self, job: JobId, profile: JobProfile, now_s: float) -> Sequence[Placement]:
        """A job's lengths have drifted beyond what it declared; answers the moves this asks for."""
        ...

    def isolate(self, job: JobId, now_s: float) -> Sequence[Placement]:
        """Give a placed job nodes of its own, since its SLO leaves no time for others; empty if
        there are none.
        """
        ...

    def rebalance(self, now_s: float, profile: JobProfile | None = None) -> Sequence[Placement]:
        """Moves that pay, of jobs of this one's size or of all; asked for after an arrival or a
        departure, or from time to time. Most policies never move a job.
        """
        ...

    def next_rebalance_s(self, profile: JobProfile, now_s: float) -> float | None:
        """When a rebalance of jobs of this size has anything to look at, if ever: then it is asked
        for, again and again, so that no decision takes long.
        """
        ...

    def list_rented(self) -> Sequence[NodeId]:
        """Nodes that are paid for now, sorted."""
        ...

    def take_rent_changes(self) -> tuple[Collection[NodeId], Collection[NodeId]]:
        """Nodes that are paid for no more and newly, since this was asked last."""
        ...

    def hourly_cost(self) -> float:
        """What they cost."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if memory budgets, pool limits or pinnings do not hold."""
        ...
