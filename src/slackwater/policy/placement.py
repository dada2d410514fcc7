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
    """Which jobs share which nodes. Every method may answer with moves of jobs already placed."""

    @property
    def name(self) -> str: ...

    def place(self, job: JobSpec, now_s: float) -> Placement | Refusal:
        """Find nodes for an arriving job; nothing changes on a refusal."""
        ...

    def remove(self, job: JobId, now_s: float) -> Sequence[Placement]:
        """A job left. Its unshared nodes are given back; answers moves that have become worth while."""
        ...

    def revise(self, job: JobId, profile: JobProfile, now_s: float) -> Sequence[Placement]:
        """A job's profile changed (drift, or learned lengths); answers the moves this asks for."""
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
