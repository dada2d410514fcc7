"""Permits: which phase holds which nodes, and whose state is on the devices there."""

from collections.abc import Iterable
from dataclasses import dataclass

from slackwater.control.coschedule.commands import GrantPermit
from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase, node_of, overlap
from slackwater.policy.ordering.priority import WaitingPhase


@dataclass(slots=True)
class Permit:
    """The right of one job to run one phase on nodes, or on parts of nodes. A shrunk permit holds a
    few devices of each, beside the next rollout.
    """

    number: int
    job: JobId
    phase: Phase
    nodes: tuple[NodeId, ...]
    started_s: float
    shrunk: bool = False


class Permits:
    """Grants permits and releases them. A device runs one phase, and beside a rollout at most the
    tail of another.
    """

    def __init__(self) -> None:
        self._permits: dict[int, Permit] = {}
        self._by_job: dict[JobId, Permit] = {}
        self._holder: dict[NodeId, int] = {}
        self._tail: dict[NodeId, int] = {}
        self._resident: dict[NodeId, tuple[JobId, Phase]] = {}
        self._parts: dict[NodeId, set[NodeId]] = {}  # by node: those ever granted or reserved
        self._reserved: dict[NodeId, JobId] = {}
        self.last_number = 0

    def find_by_job(self, job: JobId) -> Permit | None:
        """The job's permit, if it has one: a job runs one phase at a time."""
        return self._by_job.get(job)

    def find(self, number: int) -> Permit | None:
        """A permit that is still held."""
        return self._permits.get(number)

    def needs_switch(self, job: JobId, phase: Phase, nodes: Iterable[NodeId]) -> bool:
        """Whether another state is on one of the nodes."""
        state = (job, phase)
        for node in nodes:  # noqa: SIM110 -- any() takes twice as long, and every phase asks.
            if self._resident.get(node, state) != state:
                return True
        return False

    def is_free(self, request: WaitingPhase) -> bool:
        """Whether the phase can run now on all its nodes; beside a tail only a rollout can."""
        for place in request.nodes:
            for node in self._overlapping(place):
                if node in self._holder or self._reserved.get(node, request.job) != request.job:
                    return False
                if node in self._tail and request.phase is not Phase.ROLLOUT:
                    return False
        return True

    def is_held_by_other(self, nodes: Iterable[NodeId], job: JobId) -> bool:
        """Whether another job has one of these nodes."""
        holders = (self._holder.get(node) for place in nodes for node in self._overlapping(place))
        return any(number is not None and self._permits[number].job != job for number in holders)

    def _record_part(self, place: NodeId) -> None:
        """Parts of a node may overlap, so `_overlapping` must know all that are in use."""
        node = node_of(place)
        if node != place:
            self._parts.setdefault(node, set()).add(place)

    def _overlapping(self, place: NodeId) -> Iterable[NodeId]:
        """The place, and others, ever granted or reserved, that share devices with it."""
        node = node_of(place)
        if node == place and node not in self._parts:
            return (place,)
        others = (node, *self._parts.get(node, ()))
        return {place, *(other for other in others if overlap(place, other))}

    def is_idle(self, node: NodeId) -> bool:
        """Whether nothing runs there, not even a tail."""
        return all(
            place not in self._holder and place not in self._tail
            for place in self._overlapping(node)
        )

    @property
    def reserved(self) -> dict[NodeId, JobId]:
        """Nodes that only one job may have next."""
        return dict(self._reserved)

    def reserve(self, nodes: Iterable[NodeId], job: JobId) -> None:
        """Let nobody but this job have the nodes until it has had them."""
        for node in nodes:
            self._reserved[node] = job
            self._record_part(node)

    def drop_reservation(self, job: JobId) -> None:
        for node in [node for node, other in self._reserved.items() if other == job]:
            del self._reserved[node]

    def find_holder(self, node: NodeId) -> JobId | None:
        """The job whose phase runs there."""
        number = self._holder.get(node, self._tail.get(node))
        return None if number is None else self._permits[number].job

    def number_after(self, number: int) -> None:
        """New permits have higher numbers than this."""
        self.last_number = max(self.last_number, number)

    def tails_on(self, nodes: Iterable[NodeId]) -> list[Permit]:
        """Shrunk permits whose rollouts still have devices of these nodes."""
        tails = {place for node in nodes for place in self._overlapping(node)} & self._tail.keys()
        numbers = {self._tail[place] for place in tails}
        return [self._permits[number] for number in sorted(numbers)]

    def grant(self, request: WaitingPhase, epoch: int, now_s: float) -> GrantPermit:
        """Grant the permit; the caller has checked `is_free`."""
        assert self.is_free(request), f"nodes of {request.job} are taken"
        assert request.job not in self._by_job, f"{request.job} holds a permit already"
        switch = self.needs_switch(request.job, request.phase, request.nodes)
        self.drop_reservation(request.job)
        self.last_number += 1
        permit = Permit(self.last_number, request.job, request.phase, request.nodes, now_s)
        self._permits[permit.number] = permit
        self._by_job[permit.job] = permit
        for node in permit.nodes:
            self._holder[node] = permit.number
            self._record_part(node)
            for place in self._overlapping(node):
                if place == node or place in self._resident:
                    self._resident[place] = (permit.job, permit.phase)
        return GrantPermit(permit.number, permit.job, epoch, permit.phase, permit.nodes, switch)

    def can_shrink(self, permit: Permit) -> bool:
        """Not while another rollout's tail is on one of its nodes."""
        return (
            permit.phase is Phase.ROLLOUT and not permit.shrunk and not self.tails_on(permit.nodes)
        )

    def shrink(self, permit: Permit) -> None:
        """Keep a few devices of each node and free the rest."""
        assert self.can_shrink(permit), f"permit {permit.number} cannot shrink"
        permit.shrunk = True
        for node in permit.nodes:
            del self._holder[node]
            self._tail[node] = permit.number

    def release(self, permit: Permit) -> None:
        """Free the nodes of a permit whose phase, or whose job, ended."""
        del self._permits[permit.number]
        del self._by_job[permit.job]
        table = self._tail if permit.shrunk else self._holder
        for node in permit.nodes:
            assert table[node] == permit.number, f"{node} is held by another"
            del table[node]

    def forget(self, nodes: Iterable[NodeId]) -> None:
        """These nodes were returned: no state is resident there any more."""
        for node in nodes:
            assert node not in self._holder and node not in self._tail, f"{node} is in use"
            self._resident.pop(node, None)

    def active(self) -> Iterable[Permit]:
        """All permits that jobs hold now."""
        return self._permits.values()

    def check_integrity(self) -> None:
        """Check that a node runs one phase with its state resident, and a job holds one permit."""
        for number, permit in self._permits.items():
            assert self._by_job[permit.job] is permit and permit.number == number
            table = self._tail if permit.shrunk else self._holder
            for node in permit.nodes:
                assert table[node] == number, f"{node} is not held by permit {number}"
                if not permit.shrunk:
                    assert self._resident[node] == (permit.job, permit.phase), (
                        f"{node} holds other state"
                    )
        for node in self._holder:
            both = [other for other in self._overlapping(node) if other in self._holder]
            assert both == [node], f"{both} are held at once"
        held = sum(len(permit.nodes) for permit in self._permits.values())
        assert held == len(self._holder) + len(self._tail), "a node is held without a permit"
        assert len(self._by_job) == len(self._permits)
