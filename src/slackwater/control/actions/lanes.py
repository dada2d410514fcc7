"""Lanes: the queue and running attempts of one node's cores, the GPU pool, or one limit."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slackwater.control.actions.commands import Command
from slackwater.control.actions.fair_queue import FairQueue
from slackwater.control.actions.live import Attempt, LiveAction, TenantState
from slackwater.model.action import Grant, WorkerCapacity
from slackwater.model.amounts import CORES, MEMORY_MIB
from slackwater.model.ids import EnvironmentId, NodeId, ResourceName, TenantId
from slackwater.policy.actions.curve import DurationCurve
from slackwater.policy.actions.load import ElasticLoad, LoadAverage
from slackwater.policy.actions.topology import Topology, make_unit_topology

_UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a lane granted to an action, and the commands to execute before it starts."""

    node: NodeId | None = None
    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    setup: tuple[Command, ...] = ()
    setup_s: float = 0.0


class Lane:
    """A resource's queue, running attempts and units; the base class has unlimited units."""

    resource: ResourceName

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: dict[int, Attempt] = {}
        self.short = LoadAverage()
        self.elastic = ElasticLoad()
        self.queued_units = 0  # the least units that queued actions need
        self.held_units: dict[TenantId, int] = {}  # by running attempts
        self.queue = FairQueue()

    def __len__(self) -> int:
        return len(self.queue)

    def __iter__(self) -> Iterator[LiveAction]:
        return iter(self.queue.iterate())

    def add(self, action: LiveAction) -> None:
        self.queue.add(action)
        self.queued_units += action.curve.least

    def remove(self, action: LiveAction) -> None:
        self.queue.remove(action)
        self.queued_units -= action.curve.least

    def start(self, attempt: Attempt, expected_s: float) -> None:
        """Add a running attempt."""
        self.running[attempt.number] = attempt
        tenant = attempt.action.spec.tenant
        self.held_units[tenant] = self.held_units.get(tenant, 0) + attempt.units
        self.queue.charge_start(attempt, expected_s)

    def end(self, attempt: Attempt, now_s: float) -> bool:
        """Remove a running attempt; return whether it ran here."""
        if self.running.pop(attempt.number, None) is None:
            return False
        self.held_units[attempt.action.spec.tenant] -= attempt.units
        self.queue.settle(attempt, now_s)
        return True

    def max_units_for(self, owner: TenantState) -> float:
        """The most units that the tenant may hold here."""
        return math.inf

    def remaining_for(self, owner: TenantState) -> float:
        """Units that the tenant may still take here, free or not."""
        return self.max_units_for(owner) - self.held_units.get(owner.tenant, 0)

    @property
    def free(self) -> int:
        """Free units."""
        return _UNLIMITED

    @property
    def capacity_units(self) -> int:
        """All units, free or not."""
        return _UNLIMITED

    @property
    def max_arrivals(self) -> float:
        """The most actions that can still arrive in the queue, as far as is known."""
        return math.inf

    def topology(self, most: int) -> Topology:
        raise AssertionError(f"{self.name} allocates no units by a policy")

    def curve(self, action: LiveAction) -> DurationCurve:
        """The action's duration by units, if it started here now."""
        return action.curve

    def refusal(self, action: LiveAction) -> str | None:
        """Why the action can never run here, or None."""
        return None

    def has_memory(self, action: LiveAction, promised_mib: int) -> bool:
        """Whether its memory is free, with `promised_mib` promised to others."""
        return True

    def take(self, action: LiveAction, amount: int, now_s: float) -> Allocation | None:
        """Allocate units to an action; None if they are not available and it must wait."""
        return Allocation()

    def give_back(self, action: LiveAction, grant: Grant, now_s: float) -> None:
        """Free the units of a grant."""


class NodeCores:
    """A node's free cores: whole, exclusive, and of one NUMA node if possible (ARL-Tangram 5.2)."""

    def __init__(self, numa_nodes: Sequence[Sequence[int]]) -> None:
        self.total = sum(len(cores) for cores in numa_nodes)
        self.free = self.total
        self._home = {core: i for i, cores in enumerate(numa_nodes) for core in cores}
        self._free: list[list[int]] = [sorted(cores, reverse=True) for cores in numa_nodes]

    def take(self, count: int) -> tuple[int, ...]:
        """This many: from the fullest NUMA node that has them all, else from as few as possible."""
        assert count <= self.free, f"{count} cores wanted, {self.free} free"
        self.free -= count
        enough = [cores for cores in self._free if len(cores) >= count]
        if enough:
            return self._pop(min(enough, key=len), count)
        taken: tuple[int, ...] = ()
        for cores in sorted(self._free, key=len, reverse=True):
            taken += self._pop(cores, min(count - len(taken), len(cores)))
        return taken

    @staticmethod
    def _pop(cores: list[int], count: int) -> tuple[int, ...]:
        taken = tuple(cores[len(cores) - count :][::-1])
        del cores[len(cores) - count :]
        return taken

    def give_back(self, cores: Sequence[int]) -> None:
        """They are idle again."""
        self.free += len(cores)
        for core in cores:
            self._free[self._home[core]].append(core)


class CoreLane(Lane):
    """One node: its cores, its memory, its environments."""

    resource = CORES

    def __init__(self, node: NodeId, capacity: WorkerCapacity) -> None:
        super().__init__(f"cores@{node}")
        self.node = node
        self.capacity = capacity
        self.cores = NodeCores(capacity.cores)
        self.free_mib = capacity.memory_mib
        self.environments: set[EnvironmentId] = set()
        self.opening: Counter[TenantId] = Counter()

    @property
    def free(self) -> int:
        return self.cores.free

    @property
    def capacity_units(self) -> int:
        return self.cores.total

    def max_units_for(self, owner: TenantState) -> float:
        most = owner.limits.cores_of(self.cores.total)
        return math.inf if most >= self.cores.total else most

    @property
    def max_arrivals(self) -> float:
        """Environments that run no action now; actions without an environment are not counted."""
        if not self.environments:
            return math.inf
        return max(len(self.environments) - len(self) - len(self.running), 0)

    @property
    def backlog(self) -> int:
        """How many more cores queued actions need, at least, than are free."""
        return self.queued_units - self.cores.free

    def topology(self, most: int) -> Topology:
        return make_unit_topology(self.cores.free, most)

    def refusal(self, action: LiveAction) -> str | None:
        least = action.curve.least
        if least > self.cores.total:
            return f"it needs {least} cores and the node has {self.cores.total}"
        most = action.owner.limits.cores_of(self.cores.total)
        if least > most:
            may = f"its tenant may hold {most} of the node's"
            return f"it needs {least} cores and {may} ([limits] core_share)"
        if action.memory_mib > self.capacity.memory_mib:
            has = self.capacity.memory_mib
            return f"it needs {action.memory_mib} MiB and the node has {has}"
        return None

    def has_memory(self, action: LiveAction, promised_mib: int) -> bool:
        return action.memory_mib + promised_mib <= self.free_mib

    def take(self, action: LiveAction, amount: int, now_s: float) -> Allocation:
        self.free_mib -= action.memory_mib
        return Allocation(self.node, self.cores.take(amount))

    def give_back(self, action: LiveAction, grant: Grant, now_s: float) -> None:
        self.cores.give_back(grant.cores)
        self.free_mib += grant.amount(MEMORY_MIB)


class LimitLane(Lane):
    """Actions that need nothing but limits; `LimitUsage` accounts for those."""

    def __init__(self, resource: ResourceName) -> None:
        super().__init__(f"limit:{resource}")
        self.resource = resource
