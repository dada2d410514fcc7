"""The workers of a storm: they run what they are told, and see for themselves that nothing is given
out twice.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from slackwater.control.actions import commands as do
from slackwater.control.actions import events as on
from slackwater.model.action import EnvironmentSpec, OutcomeKind, WorkerCapacity
from slackwater.model.amounts import MEMORY_MIB
from slackwater.model.ids import ActionId, EnvironmentId, NodeId


@dataclass(slots=True)
class StormWorker:
    """One worker: what it brings and what is on it now."""

    node: NodeId
    capacity: WorkerCapacity
    running: dict[int, do.StartAction] = field(default_factory=dict)
    environments: dict[EnvironmentId, EnvironmentSpec] = field(default_factory=dict)
    resident: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)

    def start(self, command: do.StartAction) -> None:
        """Take it on, if what it was granted is there and nobody else's."""
        grant, spec = command.grant, command.spec
        owned = {core for numa in self.capacity.cores for core in numa}
        assert set(grant.cores) <= owned, "cores that the node has not"
        assert set(grant.gpus) <= set(range(self.capacity.gpus)), "GPUs that the node has not"
        for other in self.running.values():
            assert not set(other.grant.cores) & set(grant.cores), "a core was granted twice"
            assert not set(other.grant.gpus) & set(grant.gpus), "a GPU was granted twice"
            same = spec.environment is not None and other.spec.environment == spec.environment
            assert not same, "two actions at once in one environment"
        if spec.environment is not None:
            assert spec.environment in self.environments, "its environment is elsewhere"
        if spec.service is not None:
            assert (spec.service, grant.gpus) in self.resident, "its service is not on its GPUs"
        self.running[command.attempt] = command
        self.check_memory()

    def check_memory(self) -> None:
        used = sum(spec.memory_mib for spec in self.environments.values())
        used += sum(each.grant.amount(MEMORY_MIB) for each in self.running.values())
        assert used <= self.capacity.memory_mib, f"{self.node}: {used} MiB in use"


class StormWorkers:
    """All workers; `happen` gives the broker an event, `after` lets something happen later."""

    def __init__(
        self,
        rng: np.random.Generator,
        happen: Callable[[on.Event], None],
        after: Callable[[float, Callable[[], None]], None],
        now_s: Callable[[], float],
    ) -> None:
        self._rng = rng
        self._happen, self._after, self._now_s = happen, after, now_s
        self._serial = 0
        self.workers: dict[NodeId, StormWorker] = {}
        self.homeless: dict[int, do.StartAction] = {}

    def join(self) -> None:
        """A worker with a random machine."""
        self._serial += 1
        rng = self._rng
        numa = int(rng.integers(1, 3))
        each = int(rng.integers(1, 9))
        cores = tuple(tuple(range(i * each, (i + 1) * each)) for i in range(numa))
        gpus = int(rng.choice([0, 0, 1, 4, 8]))
        capacity = WorkerCapacity(cores, int(rng.integers(4_000, 20_000)), gpus, 80_000, 500_000)
        worker = StormWorker(NodeId(f"n{self._serial}"), capacity)
        self.workers[worker.node] = worker
        self._happen(on.WorkerJoined(self._now_s(), worker.node, capacity))

    def kill(self, node: NodeId) -> None:
        if self.workers.pop(node, None) is not None:
            self._happen(on.WorkerLost(self._now_s(), node, "killed by the storm"))

    def stop_all(self) -> None:
        """The broker is gone: workers stop what runs."""
        self.homeless.clear()
        for worker in self.workers.values():
            worker.running.clear()
            worker.resident.clear()

    def rejoin(self) -> None:
        """The broker is back: workers come with the environments that they kept."""
        for worker in self.workers.values():
            held = tuple(worker.environments.values())
            self._happen(on.WorkerJoined(self._now_s(), worker.node, worker.capacity, held))

    # ---- carrying out ----
    def start(self, command: do.StartAction) -> None:
        node = command.grant.node
        if node is None:
            self.homeless[command.attempt] = command
        elif node in self.workers:
            self.workers[node].start(command)
        seconds = float(self._rng.exponential(3.0))
        if command.spec.elastic is not None:
            units = command.grant.amount(command.spec.elastic.resource)
            seconds /= command.spec.elastic.efficiency.speedup(units)
        ended = OutcomeKind.DONE if self._rng.random() < 0.9 else OutcomeKind.FAILED
        self._after(seconds, lambda: self._finish(command, ended, seconds))

    def stop(self, command: do.StopAction) -> None:
        running = self._running(command.node).get(command.attempt)
        if running is not None:  # most die at once, some only after the grace
            delay_s = float(self._rng.choice([0.0, 0.1, 30.0]))
            self._after(delay_s, lambda: self._finish(running, OutcomeKind.FAILED, 1.0))

    def open(self, command: do.OpenEnvironment) -> None:
        worker = self.workers.get(command.node)
        if worker is None:
            return
        name = command.spec.environment
        worker.environments[name] = command.spec
        worker.check_memory()
        works = self._rng.random() < 0.95
        self._after(float(self._rng.exponential(0.3)), lambda: self._opened(worker, name, works))

    def close(self, command: do.CloseEnvironment) -> None:
        worker = self.workers.get(command.node)
        if worker is None:
            return
        worker.environments.pop(command.environment, None)
        inside = [c for c in worker.running.values() if c.spec.environment == command.environment]
        for running in inside:
            self._after(0.0, partial(self._finish, running, OutcomeKind.FAILED, 0.5))

    def evict(self, command: do.EvictService) -> None:
        worker = self.workers.get(command.node)
        if worker is not None:
            for other in worker.running.values():
                used = (other.spec.service, other.grant.gpus) == (command.service, command.gpus)
                assert not used, "a service was evicted under an action"
            worker.resident.discard((command.service, command.gpus))

    def restore(self, command: do.RestoreService) -> None:
        worker = self.workers.get(command.node)
        if worker is not None:
            worker.resident.add((command.service, command.gpus))

    # ---- reporting ----
    def _running(self, node: NodeId | None) -> dict[int, do.StartAction]:
        if node is None:
            return self.homeless
        worker = self.workers.get(node)
        return worker.running if worker is not None else {}

    def _finish(self, command: do.StartAction, ended: OutcomeKind, seconds: float) -> None:
        running = self._running(command.grant.node)
        if running.get(command.attempt) is not command:
            return
        del running[command.attempt]
        name: ActionId = command.spec.action
        self._happen(on.ActionFinished(self._now_s(), name, command.attempt, ended, seconds))

    def _opened(self, worker: StormWorker, name: EnvironmentId, works: bool) -> None:
        if self.workers.get(worker.node) is not worker or name not in worker.environments:
            return
        if works:
            self._happen(on.EnvironmentOpened(self._now_s(), name))
        else:
            self._happen(on.EnvironmentLost(self._now_s(), name, "no space left"))

    def lose_environment(self) -> None:
        """One dies by itself."""
        held = [(w, name) for w in self.workers.values() for name in w.environments]
        if held:
            worker, name = held[int(self._rng.integers(len(held)))]
            inside = [c for c in worker.running.values() if c.spec.environment == name]
            for running in inside:
                del worker.running[running.attempt]
                failed = OutcomeKind.FAILED
                self._happen(
                    on.ActionFinished(
                        self._now_s(), running.spec.action, running.attempt, failed, 0.1
                    )
                )
            self._happen(on.EnvironmentLost(self._now_s(), name, "out of memory"))
