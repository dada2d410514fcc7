"""Guests: jobs whose cycle is not known yet. They run phase by phase on nodes that nobody else
waits for (PlexRL 4.3, unknown jobs).

A phase has its nodes to itself whoever comes before and after it, so its length is the job's own. A
guest is in no group and no plan: it can keep a member waiting for the rest of one phase, and never
for two. Where members wait all the time, a guest would for ever: nodes are then kept for its next
phase, if the members can bear that.
"""

from collections.abc import Callable
from dataclasses import dataclass

from slackwater.control.coschedule.commands import GrantPermit
from slackwater.control.coschedule.permits import Permits
from slackwater.model.ids import JobId, NodeId
from slackwater.model.node import Pool, Role
from slackwater.model.placement import Phase
from slackwater.policy.ordering.priority import WaitingPhase
from slackwater.policy.placement.fleet import FleetView


@dataclass(slots=True)
class _Guest:
    nodes: dict[Phase, int]
    next_phase: Phase = Phase.ROLLOUT
    waits_since_s: float | None = None


class UnprofiledJobs:
    """Who is profiled, and what they wait for."""

    def __init__(self, fleet: FleetView, permits: Permits) -> None:
        self._fleet = fleet
        self._permits = permits
        self._guests: dict[JobId, _Guest] = {}

    def __contains__(self, job: JobId | None) -> bool:
        return job in self._guests

    def why_never(self, rollout_nodes: int, train_nodes: int) -> str | None:
        """Why a job that needs so many nodes can never run here, or None if it can."""
        for role, nodes in ((Role.ROLLOUT, rollout_nodes), (Role.TRAIN, train_nodes)):
            most = self._pool(role).max_nodes
            if nodes > most:
                return f"needs {nodes} {role} nodes and the pool has {most}; ask for fewer"
        return None

    def enter(self, job: JobId, rollout_nodes: int, train_nodes: int) -> None:
        """It is profiled from now on."""
        self._guests[job] = _Guest({Phase.ROLLOUT: rollout_nodes, Phase.TRAIN: train_nodes})

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
            and any(node in self._names(guest.next_phase) for node in nodes)
            for job, guest in self._guests.items()
        )

    def finished(self, job: JobId, phase: Phase) -> None:
        """A phase of it ended."""
        self._guests[job].next_phase = Phase.TRAIN if phase is Phase.ROLLOUT else Phase.ROLLOUT

    def grant(self, wanted: Callable[[NodeId], bool], now_s: float) -> list[GrantPermit]:
        """Permits for those whose nodes are free and wanted by no member of a group; who waits
        longest comes first.
        """
        granted: list[GrantPermit] = []
        for since_s, job in self._waiting():
            guest = self._guests[job]
            nodes = self._free_nodes(job, guest, wanted)
            if nodes is None:
                continue
            guest.waits_since_s = None
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
            able = [node for node in self._names(phase) if bears(node, phase, since_s)]
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
        self, job: JobId, guest: _Guest, wanted: Callable[[NodeId], bool]
    ) -> tuple[NodeId, ...] | None:
        kept = self._permits.kept
        found: list[NodeId] = []
        for node in self._names(guest.next_phase):
            mine = kept.get(node) == job
            if self._permits.is_idle(node) and (mine or (node not in kept and not wanted(node))):
                found.append(node)
                if len(found) == guest.nodes[guest.next_phase]:
                    return tuple(found)
        return None

    def check_integrity(self) -> None:
        """Nodes are kept only for guests that wait."""
        for node, job in self._permits.kept.items():
            guest = self._guests.get(job)
            assert guest is not None, f"{node} is kept for {job}, which is no guest"
            assert guest.waits_since_s is not None, f"{node} is kept for {job}, which does not wait"

    def _names(self, phase: Phase) -> list[NodeId]:
        role = Role.ROLLOUT if phase is Phase.ROLLOUT else Role.TRAIN
        return [NodeId(f"{role.value}-{number}") for number in range(self._pool(role).max_nodes)]

    def _pool(self, role: Role) -> Pool:
        return self._fleet.rollout if role is Role.ROLLOUT else self._fleet.train
