"""Guests: jobs whose cycle is not known yet. They run phase by phase on nodes that nobody else
waits for (PlexRL 4.3, unknown jobs).

A phase has its nodes to itself whoever comes before and after it, so its length, or the sum of its
pieces where it was cut, is the job's own. A guest is in no group and no plan. Where a member waits
it yields: a rollout at once, training after the step that runs; and it trains only where members
can bear to wait for such a step. Where members wait all the time, a guest would for ever: nodes are
then kept for its next phase, if the members can bear that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from slackwater.control.coschedule.commands import GrantPermit
from slackwater.control.coschedule.permits import Permit, Permits
from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobProfile
from slackwater.model.node import Role
from slackwater.model.placement import Phase, overlap
from slackwater.policy.ordering.priority import WaitingPhase
from slackwater.policy.placement.fleet import FleetView


@dataclass(slots=True)
class _Guest:
    nodes: dict[Phase, int]
    places: dict[Phase, list[NodeId]]  # nodes, or parts of them, that it could have
    next_phase: Phase = Phase.ROLLOUT
    waits_since_s: float | None = None
    owed: bool = False  # it holds nodes that were kept for it
    step_s: float | None = None  # its longest time of training that could not be cut
    last: dict[Phase, tuple[NodeId, ...]] = field(default_factory=dict)  # where its state may be


class UnprofiledJobs:
    """Who is profiled, and what they wait for."""

    def __init__(self, fleet: FleetView, permits: Permits) -> None:
        self._fleet = fleet
        self._permits = permits
        self._guests: dict[JobId, _Guest] = {}

    def __len__(self) -> int:
        return len(self._guests)

    def __contains__(self, job: JobId | None) -> bool:
        return job in self._guests

    def why_never(self, demand: JobProfile) -> str | None:
        """Why a job with this demand can never run here, or None if it can."""
        fleet = self._fleet
        for pool, nodes in (
            (fleet.rollout, demand.rollout_nodes),
            (fleet.train, demand.train_nodes),
        ):
            if nodes > pool.max_nodes:
                what = f"needs {nodes} {pool.role} nodes and the pool has {pool.max_nodes}"
                return f"{what}; ask for fewer"
        return None

    def enter(self, job: JobId, demand: JobProfile) -> None:
        """It is profiled from now on."""
        fleet = self._fleet
        rollout_part, train_part = fleet.parts(demand)
        self._guests[job] = _Guest(
            {Phase.ROLLOUT: demand.rollout_nodes, Phase.TRAIN: demand.train_nodes},
            {
                Phase.ROLLOUT: fleet.places(Role.ROLLOUT, rollout_part),
                Phase.TRAIN: fleet.places(Role.TRAIN, train_part),
            },
        )

    def leave(self, job: JobId) -> None:
        """It is known now, or gone; its permit is back already."""
        self._guests.pop(job, None)
        self._permits.keep_no_longer(job)

    def next_phase(self, job: JobId) -> Phase:
        return self._guests[job].next_phase

    def request(self, job: JobId, phase: Phase, now_s: float) -> None:
        """Its next phase waits for nodes."""
        guest = self._guests[job]
        if phase is guest.next_phase and guest.waits_since_s is None:
            guest.waits_since_s = now_s

    def wait_for(self, nodes: tuple[NodeId, ...], but: JobId) -> bool:
        """Whether another guest waits for one of the nodes."""
        return any(
            guest.waits_since_s is not None
            and job != but
            and any(node.startswith(guest.next_phase) for node in nodes)
            for job, guest in self._guests.items()
        )

    def is_owed(self, job: JobId) -> bool:
        """Whether it holds nodes that were kept for it."""
        return self._guests[job].owed

    def ran(self, job: JobId, permit: Permit, step_s: float) -> None:
        """It had a permit, and could not be cut for so long."""
        guest = self._guests[job]
        guest.owed, guest.last[permit.phase] = False, permit.nodes
        if permit.phase is Phase.TRAIN:
            guest.step_s = max(guest.step_s or 0.0, step_s)

    def finished(self, job: JobId, phase: Phase) -> None:
        """A phase of it ended."""
        self._guests[job].next_phase = Phase.TRAIN if phase is Phase.ROLLOUT else Phase.ROLLOUT

    def grant(
        self,
        wanted: Callable[[NodeId], bool],
        bears: Callable[[NodeId, float | None], bool],
        now_s: float,
    ) -> list[GrantPermit]:
        """Permits for those whose nodes are free and wanted by no member of a group, and whose
        members can bear a step of it; who waits longest comes first.
        """
        granted: list[GrantPermit] = []
        for since_s, job in self._waiting():
            guest = self._guests[job]
            nodes = self._free_nodes(job, guest, wanted, bears)
            if nodes is None:
                continue
            guest.waits_since_s = None
            guest.owed = any(self._permits.kept.get(node) == job for node in nodes)
            request = WaitingPhase(job, guest.next_phase, nodes, since_s, 0.0, 0.0)
            granted.append(self._permits.grant(request, 0, now_s))
        return granted

    def keep_nodes(self, bears: Callable[[NodeId, Phase, float], bool]) -> None:
        """Keep nodes for the guest that waits longest, unless some are kept already; `bears`:
        whether the members of a node can bear that it has such a phase, having waited since then.
        """
        if self._permits.kept:
            return
        for since_s, job in self._waiting():
            guest = self._guests[job]
            phase = guest.next_phase
            able = [node for node in guest.places[phase] if bears(node, phase, since_s)]
            if len(able) >= guest.nodes[phase]:
                self._permits.keep(able[: guest.nodes[phase]], job)
                return

    def _waiting(self) -> list[tuple[float, JobId]]:
        """Since when, who waits longest first."""
        return sorted(
            (guest.waits_since_s, job)
            for job, guest in self._guests.items()
            if guest.waits_since_s is not None
        )

    def _free_nodes(
        self,
        job: JobId,
        guest: _Guest,
        wanted: Callable[[NodeId], bool],
        bears: Callable[[NodeId, float | None], bool],
    ) -> tuple[NodeId, ...] | None:
        """First where its state is: a load elsewhere would look like a part of its phase."""
        kept, phase, found = self._permits.kept, guest.next_phase, []
        before = guest.last.get(phase, ())
        for node in sorted(guest.places[phase], key=lambda node: node not in before):
            if not self._permits.is_idle(node):
                continue
            free = not wanted(node) and not any(overlap(node, other) for other in kept)
            if free and phase is Phase.TRAIN:
                free = bears(node, guest.step_s)
            if free or kept.get(node) == job:
                found.append(node)
                if len(found) == guest.nodes[phase]:
                    return tuple(found)
        return None

    def check_integrity(self) -> None:
        """Nodes are kept only for guests that wait."""
        for node, job in self._permits.kept.items():
            guest = self._guests.get(job)
            assert guest is not None, f"{node} is kept for {job}, which is no guest"
            assert guest.waits_since_s is not None, f"{node} is kept for {job}, which does not wait"
