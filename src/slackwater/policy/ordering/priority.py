"""Orderings: which phase runs next on a group's nodes; here by response ratio or by arrival.

An ordering is a state machine that belongs to a group. Those that follow a plan are in
`planned_order.py` and `work_conserving.py`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import GroupPlan, Phase


@dataclass(frozen=True, slots=True)
class WaitingPhase:
    """A phase that waits for its nodes: since when, its expected length, and its setup time if
    another job's state is loaded there.
    """

    job: JobId
    phase: Phase
    nodes: tuple[NodeId, ...]
    since_s: float
    service_s: float
    setup_s: float


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A job of the group whose state is loaded. `next_phase` is the phase that it has not begun
    yet.

    Lengths are worst cases on the job's nodes. `running_s` is how much longer its present phase can
    take, including a sync. It must make the iterations left, including the running one, within
    `budget_s`; `clock_runs` says whether that time has begun. `leave_s` is the time that they take
    on its own nodes, including the move there; infinite if no own nodes are certain. `bound_s`
    bounds each iteration; `iteration_s` of the running one have passed. Each iteration should also
    keep `target_s`, but no SLO depends on that.
    """

    job: JobId
    rollout_nodes: tuple[NodeId, ...]
    train_nodes: tuple[NodeId, ...]
    rollout_s: float
    train_s: float
    sync_s: float
    next_phase: Phase
    running_s: float = 0.0
    budget_s: float = math.inf
    iterations_left: int = 0
    clock_runs: bool = True
    leave_s: float = math.inf
    bound_s: float = math.inf
    iteration_s: float = 0.0
    target_s: float = math.inf


class Ordering(Protocol):
    """Picks the next phase to run in one group."""

    def adopt(self, members: Sequence[LoadedJob], plan: GroupPlan | None) -> None:
        """Order these jobs from now on, in order of admission: after a join or with a new plan."""

    def joining_loss_s(
        self, members: Sequence[LoadedJob], plan: GroupPlan | None
    ) -> tuple[float, float]:
        """The worst delay of one of these members beyond its slack, and the length of the cycle."""

    def leave(self, job: JobId) -> None:
        """Remove a job that finished, crashed or moved."""

    def pick(
        self, waiting: Iterable[WaitingPhase], free: Callable[[WaitingPhase], bool], now_s: float
    ) -> WaitingPhase | None:
        """The next phase to run among those whose nodes are all free, or None if all should
        wait.
        """

    def record_start(self, job: JobId, phase: Phase, nodes: Sequence[NodeId]) -> None:
        """The body was told to run it."""

    def jobs(self) -> Container[JobId]:
        """Who takes part."""


def response_ratio(request: WaitingPhase, now_s: float) -> float:
    """1 + waiting / (service + setup if a switch is needed), PlexRL 4.4: long waits win in the end,
    so no one starves.
    """
    return 1 + (now_s - request.since_s) / (request.service_s + request.setup_s)


class _PriorityOrder(ABC):
    """Runs the first phase by priority whose nodes are free. A phase that must wait reserves its
    nodes.
    """

    def __init__(self) -> None:
        self._jobs: set[JobId] = set()

    def adopt(self, members: Sequence[LoadedJob], plan: GroupPlan | None) -> None:
        self._jobs = {member.job for member in members}

    def joining_loss_s(
        self, members: Sequence[LoadedJob], plan: GroupPlan | None
    ) -> tuple[float, float]:
        return 0.0, 0.0

    def leave(self, job: JobId) -> None:
        self._jobs.discard(job)

    def record_start(self, job: JobId, phase: Phase, nodes: Sequence[NodeId]) -> None:
        del job, phase, nodes

    def jobs(self) -> Container[JobId]:
        return self._jobs

    @abstractmethod
    def _rank(self, request: WaitingPhase, now_s: float) -> tuple[float, JobId]:
        """The sort key; the least goes first."""

    def pick(
        self, waiting: Iterable[WaitingPhase], free: Callable[[WaitingPhase], bool], now_s: float
    ) -> WaitingPhase | None:
        claimed: set[NodeId] = set()
        for request in sorted(waiting, key=lambda request: self._rank(request, now_s)):
            if claimed.isdisjoint(request.nodes) and free(request):
                return request
            claimed.update(request.nodes)
        return None


class HighestResponseRatio(_PriorityOrder):
    """HRRS (PlexRL 4.4): setup lowers the ratio, so work for the resident job is batched."""

    def _rank(self, request: WaitingPhase, now_s: float) -> tuple[float, JobId]:
        return -response_ratio(request, now_s), request.job


class FirstComeFirstServed(_PriorityOrder):
    """By time of request."""

    def _rank(self, request: WaitingPhase, now_s: float) -> tuple[float, JobId]:
        return request.since_s, request.job
