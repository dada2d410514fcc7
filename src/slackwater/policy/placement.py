"""The interface of all placement policies: which jobs share which nodes.

A policy is a deterministic state machine without I/O: it names the nodes it rents (`rollout-0`, `train-3`, the lowest free
number first) and gives them back when no job uses them. Whoever drives it compares `rented()` before and after.
"""

from collections.abc import Sequence
from typing import Protocol

from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.placement import Placement, Refusal


class PlacementPolicy(Protocol):
    """Which jobs share which nodes. `remove`, `revise` and `rebalance` may answer with moves of jobs already placed.

    A placement that carries a plan replaces the plan of its whole group, from now on. A move names a job that
    is placed already: its processes restart on the new nodes.
    """

    @property
    def name(self) -> str: ...

    def place(self, job: JobSpec, now_s: float) -> Placement | Refusal:
        """Find nodes for an arriving job; nothing changes on a refusal."""
        ...

    def report(self, job: JobId, iterations_done: int, now_s: float) -> None:
        """A job has made so many iterations since it was placed first; time it is ahead of its bound is credit."""
        ...

    def remove(self, job: JobId, now_s: float) -> Sequence[Placement]:
        """A job left. Its unshared nodes are given back; answers moves that have become worth while."""
        ...

    def revise(self, job: JobId, profile: JobProfile, now_s: float) -> Sequence[Placement]:
        """A job's profile changed (drift, or learned lengths); answers the moves this asks for."""
        ...

    def rebalance(self, now_s: float) -> Sequence[Placement]:
        """Moves that pay, asked for after an arrival or from time to time; most policies never move a job."""
        ...

    def rented(self) -> Sequence[NodeId]:
        """Nodes that are paid for now, sorted."""
        ...

    def hourly_cost(self) -> float:
        """What they cost."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if memory budgets, pool limits or pinnings do not hold."""
        ...
