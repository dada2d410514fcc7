"""The GPUs of the pool: aligned chunks, and the services that their memory holds (ARL-Tangram 5.3).

A service stays on its GPUs until another needs the memory, least recently used first. Nothing is
written back, since host memory has a copy. A GPU runs one action at a time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slackwater.control.actions.commands import EvictService, RestoreService
from slackwater.control.actions.lanes import Allocation, Lane
from slackwater.control.actions.live import LiveAction
from slackwater.model.action import GpuService, Grant, ServiceShape, WorkerCapacity
from slackwater.model.amounts import GPUS
from slackwater.model.ids import NodeId, ServiceName
from slackwater.policy.actions.curve import DurationCurve
from slackwater.policy.actions.topology import LEVELS, WHOLE, Topology, make_chunk_topology


@dataclass(slots=True)
class ResidentService:
    """A service that a chunk's memory holds."""

    service: ServiceName
    gpus: tuple[int, ...]
    gpu_mib: int
    used_s: float


@dataclass(slots=True)
class GpuNode:
    """One node's GPUs: which are idle, and which services their memory holds."""

    node: NodeId
    count: int
    gpu_mib: int
    idle: set[int] = field(default_factory=set)
    residents: list[ResidentService] = field(default_factory=list)

    def whole_chunks(self) -> list[tuple[int, ...]]:
        """The idle GPUs as the largest aligned chunks that they make."""
        found: list[tuple[int, ...]] = []
        start = 0
        while start < self.count:
            size = WHOLE
            while size and (
                start % size
                or start + size > self.count
                or not self.idle.issuperset(range(start, start + size))
            ):
                size >>= 1
            if size:
                found.append(tuple(range(start, start + size)))
            start += size or 1
        return found

    def resident(self, service: ServiceName, gpus: tuple[int, ...]) -> ResidentService | None:
        return next((r for r in self.residents if r.service == service and r.gpus == gpus), None)

    def chunks(
        self, service: ServiceName, size: int
    ) -> Iterable[tuple[tuple[bool, int, float, NodeId, int], tuple[int, ...]]]:
        """Idle chunks of this size by preference: with the service, small, long unused."""
        ready = {r.gpus for r in self.residents if r.service == service}
        for whole in self.whole_chunks():
            for first in range(0, len(whole) - size + 1, size):
                gpus = whole[first : first + size]
                used_s = self.last_used_s(gpus)
                yield (gpus not in ready, len(whole), used_s, self.node, gpus[0]), gpus

    def last_used_s(self, gpus: Sequence[int]) -> float:
        """When a service on these GPUs was last used; -1 if they are empty."""
        held = set(gpus)
        return max((r.used_s for r in self.residents if held & set(r.gpus)), default=-1.0)


class GpuLane(Lane):
    """All GPUs of all nodes, and the declared services: an action may run on any chunk."""

    resource = GPUS

    def __init__(self) -> None:
        super().__init__("gpus")
        self.services: dict[ServiceName, GpuService] = {}
        self.nodes: dict[NodeId, GpuNode] = {}
        self._free = self._total = 0

    @property
    def free(self) -> int:
        return self._free

    @property
    def capacity_units(self) -> int:
        return self._total

    def join(self, node: NodeId, capacity: WorkerCapacity) -> None:
        if capacity.gpus:
            gpus = set(range(capacity.gpus))
            self.nodes[node] = GpuNode(node, capacity.gpus, capacity.gpu_mib, gpus)
            self._free += capacity.gpus
            self._total += capacity.gpus

    def leave(self, node: NodeId) -> None:
        gone = self.nodes.pop(node, None)
        if gone is not None:
            self._free -= len(gone.idle)
            self._total -= gone.count

    def topology(self, most: int) -> Topology:
        """Idle chunks of each level that are not halves of larger ones."""
        counts = [0] * LEVELS
        for node in self.nodes.values():
            for chunk in node.whole_chunks():
                counts[len(chunk).bit_length() - 1] += 1
        return make_chunk_topology(tuple(counts))

    def curve(self, action: LiveAction) -> DurationCurve:
        """Adds the time to restore the service for sizes of which no idle chunk holds it."""
        service = action.spec.service
        assert service is not None
        declared = self.services[service]
        seconds = np.full_like(action.curve.seconds, np.inf)
        choices = self._degrees(service, action.curve.choices)
        for size in choices:
            seconds[size] = action.curve.seconds[size]
            degree = declared.degree(size)
            if degree is not None and not self._has_idle_resident(service, size):
                seconds[size] += degree.restore_s
        return replace(action.curve, seconds=seconds, choices=choices, convex=False)

    def refusal(self, action: LiveAction) -> str | None:
        service = action.spec.service
        assert service is not None
        if service not in self.services:
            return f"service {service} is not declared"
        if self.nodes and not self._degrees(service, action.curve.choices):
            return f"no node can hold service {service} on {list(action.curve.choices)} GPUs"
        return None

    def _degrees(self, service: ServiceName, choices: Sequence[int]) -> tuple[int, ...]:
        """The numbers of GPUs on which some node can hold the service."""
        declared = self.services.get(service)
        if declared is None:
            return ()
        return tuple(
            units
            for units in choices
            if (degree := declared.degree(units)) is not None
            and any(
                node.count >= degree.gpus and node.gpu_mib >= degree.gpu_mib
                for node in self.nodes.values()
            )
        )

    def _has_idle_resident(self, service: ServiceName, size: int) -> bool:
        """Whether an idle chunk of this size holds the service in memory."""
        return any(
            resident.service == service
            and len(resident.gpus) == size
            and node.idle.issuperset(resident.gpus)
            for node in self.nodes.values()
            for resident in node.residents
        )

    def take(self, action: LiveAction, amount: int, now_s: float) -> Allocation | None:
        """A chunk with the service on it, and what to do first; None if no idle chunk fits."""
        service = action.spec.service
        assert service is not None
        degree = self.services[service].degree(amount)
        assert degree is not None
        candidates = (
            (preference, node, chunk)
            for node in self.nodes.values()
            if node.gpu_mib >= degree.gpu_mib
            for preference, chunk in node.chunks(service, amount)
        )
        best = min(candidates, key=lambda candidate: candidate[0], default=None)
        if best is None:
            return None
        _, node, gpus = best
        setup = self._make_resident(node, gpus, service, degree, now_s)
        node.idle.difference_update(gpus)
        self._free -= amount
        return Allocation(node.node, (), gpus, tuple(setup), degree.restore_s if setup else 0.0)

    @staticmethod
    def _make_resident(
        node: GpuNode,
        gpus: tuple[int, ...],
        service: ServiceName,
        degree: ServiceShape,
        now_s: float,
    ) -> list[EvictService | RestoreService]:
        resident = node.resident(service, gpus)
        if resident is not None:
            resident.used_s = now_s
            return []
        commands: list[EvictService | RestoreService] = []
        for gpu in gpus:
            on_it = sorted((r for r in node.residents if gpu in r.gpus), key=lambda r: r.used_s)
            held_mib = sum(r.gpu_mib for r in on_it)
            for old in on_it:
                if held_mib + degree.gpu_mib <= node.gpu_mib:
                    break
                held_mib -= old.gpu_mib
                node.residents.remove(old)
                commands.append(EvictService(node.node, old.gpus, old.service))
        node.residents.append(ResidentService(service, gpus, degree.gpu_mib, now_s))
        return [*commands, RestoreService(node.node, gpus, service)]

    def give_back(self, action: LiveAction, grant: Grant, now_s: float) -> None:
        """Idle again; the service stays."""
        assert grant.node is not None and action.spec.service is not None
        held = self.nodes[grant.node]
        held.idle.update(grant.gpus)
        self._free += len(grant.gpus)
        resident = held.resident(action.spec.service, grant.gpus)
        if resident is not None:
            resident.used_s = now_s
