"""The interface of all placement policies: which jobs share which nodes.

A policy is a deterministic state machine without I/O. It names the nodes that it rents
(`rollout-0`, `train-3`, the lowest free number first) and gives them back when no job uses them.
`take_rent_changes()` says which nodes changed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.placement import Placement, Refusal


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a placed job: the iterations left, and the time that its SLO leaves for them.

    The running iteration counts as a whole one in `iterations_left`. `budget_s` includes only a
    small part of the time that the job saved by iterations shorter than declared. `rollout_s` and
    `train_s` are the recent lengths of its phases on the nodes of its profile; None before there
    were any. While `may_move` is False the job must stay on its nodes.
    """

    job: JobId
    iterations_left: int
    budget_s: float
    rollout_s: float | None = None
    train_s: float | None = None
    may_move: bool = True


class PlacementPolicy(Protocol):
    """Decides which jobs share which nodes. `revise`, `isolate` and `rebalance` may return moves of
    placed jobs.

    A placement with a plan replaces the plan of its whole group. If its nodes are those that the
    job has already, nothing else changes; otherwise it is a move, and the job's processes restart
    on the new nodes. The caller calls `observe` just before each `place`, `remove`, `revise`,
    `isolate` and `rebalance`, with the progress of the placed jobs of the same part size: other
    jobs share no nodes with it. The caller may execute all decisions of one instant together; of
    several placements of a job the last one counts.
    """

    @property
    def name(self) -> str: ...

    def observe(self, progress: Sequence[JobProgress], waiting: Sequence[JobSpec] = ()) -> None:
        """Record the progress of placed jobs (of others the last report still holds), and which
        jobs are waiting, with the iterations that they have left.
        """
        ...

    def admission_order(self, waiting: Sequence[JobSpec]) -> Sequence[JobId]:
        """The order in which waiting jobs (given in order of arrival) are tried when a job has
        left.
        """
        ...

    def place(self, job: JobSpec, now_s: float) -> Placement | Refusal:
        """Find nodes for an arriving job; nothing changes on a refusal."""
        ...

    def remove(self, job: JobId) -> None:
        """Forget a job and give back the nodes that no other job uses. The next rebalance finds
        moves that pay now.
        """
        ...

    def revise(self, job: JobId, profile: JobProfile, now_s: float) -> Sequence[Placement]:
        """Take over phase lengths that drifted beyond the declared ones; return the moves that
        follow.
        """
        ...

    def isolate(self, job: JobId, now_s: float) -> Sequence[Placement]:
        """Move a job to its own nodes, because its SLO leaves no time for sharing; no moves if none
        are free.
        """
        ...

    def rebalance(self, now_s: float, profile: JobProfile | None = None) -> Sequence[Placement]:
        """Return moves that pay, among jobs of this profile's part size or of all sizes. Called
        after arrivals and departures, and at the times of `next_rebalance_s`. Most policies never
        move a job.
        """
        ...

    def next_rebalance_s(self, profile: JobProfile, now_s: float) -> float | None:
        """When to rebalance jobs of this profile's part size, or None. A long search is split over
        several calls, so that no single decision takes long.
        """
        ...

    def list_rented(self) -> Sequence[NodeId]:
        """The rented nodes, sorted."""
        ...

    def take_rent_changes(self) -> tuple[Collection[NodeId], Collection[NodeId]]:
        """The nodes released and acquired since the last call."""
        ...

    def hourly_cost(self) -> float:
        """The rent of all rented nodes."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if memory budgets, pool limits or pinnings do not hold."""
        ...
