"""The GPUs of the pool: aligned chunks, and the services that their memory holds (ARL-Tangram 5.3).

A service stays on its GPUs until another needs the memory, least recently used first. Nothing is
written back, since host memory has a copy. A GPU runs one action at a time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slackwater.control.actions.commands import EvictService, RestoreService
from slackwater.model.action import GpuService, ServiceShape, WorkerCapacity
from slackwater.model.ids import NodeId, ServiceName
from slackwater.policy.actions.topology import LEVELS, WHOLE


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


class GpuPool:
    """All nodes' GPUs and the declared services."""

    def __init__(self) -> None:
        self.services: dict[ServiceName, GpuService] = {}
        self.nodes: dict[NodeId, GpuNode] = {}
        self.free = 0
        self.total = 0

    def join(self, node: NodeId, capacity: WorkerCapacity) -> None:
        if capacity.gpus:
            gpus = set(range(capacity.gpus))
            self.nodes[node] = GpuNode(node, capacity.gpus, capacity.gpu_mib, gpus)
            self.free += capacity.gpus
            self.total += capacity.gpus

    def leave(self, node: NodeId) -> None:
        gone = self.nodes.pop(node, None)
        if gone is not None:
            self.free -= len(gone.idle)
            self.total -= gone.count

    def free_chunks(self) -> tuple[int, ...]:
        """How many idle chunks there are of each level that are not halves of larger ones."""
        counts = [0] * LEVELS
        for node in self.nodes.values():
            for chunk in node.whole_chunks():
                counts[len(chunk).bit_length() - 1] += 1
        return tuple(counts)

    def degrees(self, service: ServiceName, choices: Sequence[int]) -> tuple[int, ...]:
        """The numbers of GPUs on which some node of the pool can hold the service."""
        declared = self.services.get(service)
        if declared is None:
            return ()
        return tuple(units for units in choices if self._can_hold(declared.degree(units)))

    def _can_hold(self, degree: ServiceShape | None) -> bool:
        return degree is not None and any(
            node.count >= degree.gpus and node.gpu_mib >= degree.gpu_mib
            for node in self.nodes.values()
        )

    def idle_residents(self, service: ServiceName, size: int) -> int:
        """How many idle chunks of this size hold the service in memory."""
        return sum(
            1
            for node in self.nodes.values()
            for resident in node.residents
            if resident.service == service
            and len(resident.gpus) == size
            and node.idle.issuperset(resident.gpus)
        )

    def take(
        self, service: ServiceName, size: int, now_s: float
    ) -> tuple[NodeId, tuple[int, ...], list[EvictService | RestoreService]] | None:
        """A chunk with the service on it, and what to do first; None if no idle chunk fits."""
        degree = self.services[service].degree(size)
        assert degree is not None
        candidates = (
            (preference, node, chunk)
            for node in self.nodes.values()
            if node.gpu_mib >= degree.gpu_mib
            for preference, chunk in node.chunks(service, size)
        )
        best = min(candidates, key=lambda candidate: candidate[0], default=None)
        if best is None:
            return None
        _, node, gpus = best
        commands = self._make_resident(node, gpus, service, degree, now_s)
        node.idle.difference_update(gpus)
        self.free -= size
        return node.node, gpus, commands

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

    def give_back(
        self, node: NodeId, gpus: Sequence[int], service: ServiceName, now_s: float
    ) -> None:
        """Idle again; the service stays."""
        held = self.nodes[node]
        held.idle.update(gpus)
        self.free += len(gpus)
        resident = held.resident(service, tuple(gpus))
        if resident is not None:
            resident.used_s = now_s

    def check_integrity(self) -> None:
        assert self.free == sum(len(node.idle) for node in self.nodes.values())
        for node in self.nodes.values():
            assert node.idle <= set(range(node.count))
            for gpu in range(node.count):
                held_mib = sum(r.gpu_mib for r in node.residents if gpu in r.gpus)
                assert held_mib <= node.gpu_mib, f"{node.node} gpu {gpu} holds {held_mib} MiB"
