"""The interface of all placement policies: which jobs share which nodes.

A policy is a deterministic state machine without I/O: it names the nodes it rents (`rollout-0`, `train-3`, the lowest free
number first) and gives them back when no job uses them. Whoever drives it compares `rented()` before and after.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.placement import Placement, Refusal


@dataclass(frozen=True, slots=True)
class Standing:
    """How a placed job stands: what it has still to do, and the time that its SLO leaves for it.

    `budget_s` is the bound on its whole run less the time since it was placed. `learned` are bounds on the mean phase lengths
    that hold but for the miss probability, once enough iterations were seen; the declared worst case stays in the job's spec.
    `move_s` is what stopping it and starting it elsewhere takes.
    """

    job: JobId
    iterations_left: int
    budget_s: float
    move_s: float
    learned: JobProfile | None = None


class PlacementPolicy(Protocol):
    """Which jobs share which nodes. Every method may answer with moves of jobs already placed.

    A placement on the nodes that a job has already is no move: it only brings the group's new plan. Whoever drives the policy
    calls `observe` with all placed jobs just before each of the methods that decide.
    """

    @property
    def name(self) -> str: ...

    def observe(self, standings: Sequence[Standing]) -> None:
        """How the placed jobs stand now; policies that plan by declared lengths only ignore it."""
        ...

    def place(self, job: JobSpec, now_s: float) -> Placement | Refusal:
        """Find nodes for an arriving job; nothing changes on a refusal."""
        ...

    def remove(self, job: JobId, now_s: float) -> Sequence[Placement]:
        """A job left. Its unshared nodes are given back; answers moves that have become worth while."""
        ...

    def revise(self, job: JobId, profile: JobProfile, now_s: float) -> Sequence[Placement]:
        """A job's profile changed (drift, or learned lengths); answers the moves this asks for."""
        ...

    def isolate(self, job: JobId, now_s: float) -> Sequence[Placement]:
        """Give a placed job nodes of its own, since its SLO leaves no time for others; empty if there are none."""
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
