"""Reward models on GPUs: the broker with services restored on demand, against a fixed place for
each and against loading models as requests come.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.actions.simulated.times import ActionTimes
from slackwater.control.actions import commands as do
from slackwater.control.actions import events as on
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.broker_state import BrokerSettings
from slackwater.model.action import (
    ActionSpec,
    GpuService,
    OutcomeKind,
    ServiceShape,
    WorkerCapacity,
)
from slackwater.model.amounts import GPUS, Amounts, Efficiency, Elastic, Need
from slackwater.model.ids import ActionId, JobId, NodeId, ServiceName
from slackwater.sim.core.queue import EventQueue

KIND = "reward"
_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """A trajectory ended at `at_s` and wants a score that takes `work_s` on one GPU."""

    at_s: float
    service: int
    work_s: float


@dataclass(frozen=True, slots=True)
class RewardWorkload:
    """Ten teacher and judge models behind the tasks of one batch (ARL-Tangram 6.1: MOPD + Search).

    A score is one prefill of a trajectory, about 16 K tokens through a 32 B model: 1 PFLOP, 2.5 s
    on a GPU that does 0.4 PFLOP/s. Tasks differ in popularity and in how long their rollouts take,
    so their requests come in waves. Tensor parallelism costs what prefills usually lose.
    """

    services: int = 10
    work_mean_s: float = 2.5
    work_sigma: float = 0.6
    rollout_mean_s: float = 200.0
    rollout_sigma: float = 0.4
    task_spread: float = 0.4
    popularity: float = 2.0
    efficiency: Efficiency = field(
        default_factory=lambda: Efficiency(((1, 1.0), (2, 0.92), (4, 0.82), (8, 0.68)))
    )

    def draw(self, batch: int, seed: int) -> list[RewardRequest]:
        """The requests of one RL step, in order of time."""
        rng = np.random.default_rng(seed)
        shares = rng.dirichlet(np.full(self.services, self.popularity))
        means = self.rollout_mean_s * np.exp(self.task_spread * rng.standard_normal(self.services))
        which = rng.choice(self.services, size=batch, p=shares)
        spread = self.rollout_sigma
        at_s = means[which] * np.exp(spread * rng.standard_normal(batch) - spread**2 / 2)
        mu = np.log(self.work_mean_s) - self.work_sigma**2 / 2
        work_s = rng.lognormal(mu, self.work_sigma, batch)
        rows = sorted(zip(at_s.tolist(), which.tolist(), work_s.tolist(), strict=True))
        return [RewardRequest(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class GpuCluster:
    """GPUs in nodes of eight. A 32 B model is 64 GB in bf16; host memory feeds each GPU at 25 GB/s.
    `cold_start_s`: bringing such a model up by a serverless system (load from local storage at 5
    GB/s a GPU, start the engine).
    """

    gpus: int = 40
    gpu_mib: int = 80_000
    weights_gb: float = 64.0
    host_gb_per_s: float = 25.0
    overhead_s: float = 0.02
    static_degree: int = 4
    cold_start_s: float = 5.2

    def services(self, count: int) -> list[GpuService]:
        degrees = tuple(
            ServiceShape(n, int(1000 * (self.weights_gb / n + 4.0)), self._restore_s(n))
            for n in _SIZES
        )
        return [GpuService(ServiceName(f"r{i}"), degrees) for i in range(count)]

    def _restore_s(self, gpus: int) -> float:
        return self.weights_gb / gpus / self.host_gb_per_s

    def nodes(self) -> list[int]:
        """GPUs of each node."""
        whole, rest = divmod(self.gpus, 8)
        return [8] * whole + ([rest] if rest else [])


class BrokerRun:
    """The requests over our broker."""

    def __init__(
        self,
        cluster: GpuCluster,
        workload: RewardWorkload,
        settings: BrokerSettings | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._cluster, self._workload, self._clock = cluster, workload, clock
        self._broker = ActionBroker(settings)
        self._queue: EventQueue[on.Event] = EventQueue()
        self._services = {s.service: s for s in cluster.services(workload.services)}
        self._restoring: set[tuple[NodeId, tuple[int, ...]]] = set()
        self.times = ActionTimes()
        self.restored_s = 0.0

    def run(self, requests: Sequence[RewardRequest]) -> ActionTimes:
        for service in self._services.values():
            self._tell(on.ServiceDeclared(0.0, service), requests)
        for i, gpus in enumerate(self._cluster.nodes()):
            capacity = WorkerCapacity((), 0, gpus, self._cluster.gpu_mib)
            self._tell(on.WorkerJoined(0.0, NodeId(f"g{i}"), capacity), requests)
        sizes = Amounts.from_choices(*(n for n in _SIZES if n <= self._cluster.gpus))
        elastic = Elastic(GPUS, self._workload.efficiency)
        for i, request in enumerate(requests):
            label = ServiceName(f"r{request.service}")
            needs = (Need(GPUS, sizes),)
            spec = ActionSpec(
                ActionId(str(i)),
                JobId("mopd"),
                KIND,
                needs,
                service=label,
                elastic=elastic,
                single_unit_s=request.work_s,
            )
            self._queue.push(request.at_s, on.ActionSubmitted(request.at_s, spec))
        while len(self._queue):
            self._tell(self._queue.pop(), requests)
        self.times.finished_s = self._queue.now_s
        return self.times

    def _tell(self, event: on.Event, requests: Sequence[RewardRequest]) -> None:
        began_s = self._clock() if self._clock else 0.0
        commands = self._broker.handle(event)
        if self._clock:
            self.times.decision_s.append(self._clock() - began_s)
        for command in commands:
            match command:
                case do.RestoreService(node, gpus, _):
                    self._restoring.add((node, gpus))
                case do.StartAction():
                    self._start(command, requests)
                case do.EndAction(action, _):
                    took_s = event.now_s - requests[int(action)].at_s
                    self.times.add(int(action), KIND, took_s)

    def _start(self, command: do.StartAction, requests: Sequence[RewardRequest]) -> None:
        grant, spec = command.grant, command.spec
        assert grant.node is not None and spec.service is not None
        restore_s = 0.0
        if (grant.node, grant.gpus) in self._restoring:
            self._restoring.discard((grant.node, grant.gpus))
            degree = self._services[spec.service].degree(len(grant.gpus))
            assert degree is not None
            restore_s = degree.restore_s
            self.restored_s += restore_s
        ran_s = requests[int(spec.action)].work_s / self._workload.efficiency.speedup(
            len(grant.gpus)
        )
        done_s = self._queue.now_s + self._cluster.overhead_s + restore_s + ran_s
        finished = on.ActionFinished(done_s, spec.action, command.attempt, OutcomeKind.DONE, ran_s)
        self._queue.push(done_s, finished)


def static_services(
    cluster: GpuCluster, workload: RewardWorkload, requests: Sequence[RewardRequest]
) -> ActionTimes:
    """Every model has its own GPUs for ever and serves its requests in order: prefills fill the
    GPUs, so batching them gains nothing.
    """
    times = ActionTimes()
    each = cluster.gpus // workload.services
    faster = workload.efficiency.speedup(min(each, cluster.static_degree))
    free_s = [0.0] * workload.services
    for i, request in enumerate(requests):
        begins_s = max(free_s[request.service], request.at_s)
        free_s[request.service] = begins_s + request.work_s / faster
        times.add(i, KIND, free_s[request.service] - request.at_s)
    times.finished_s = max(free_s)
    return times


def serverless(
    cluster: GpuCluster, workload: RewardWorkload, requests: Sequence[RewardRequest]
) -> ActionTimes:
    """Models are brought up where requests find none, on slots of a fixed number of GPUs, the least
    recently used going first (ServerlessLLM's way).
    """
    times = ActionTimes()
    slots = cluster.gpus // cluster.static_degree
    faster = workload.efficiency.speedup(cluster.static_degree)
    held = list(range(slots))
    used_s = [0.0] * slots
    idle = set(range(slots))
    queue: EventQueue[tuple[str, int]] = EventQueue()
    waiting: deque[int] = deque()
    for i, request in enumerate(requests):
        queue.push(request.at_s, ("came", i))

    def start() -> None:
        while waiting and idle:
            i = waiting.popleft()
            request = requests[i]
            slot = min(idle, key=lambda s: (held[s] != request.service, used_s[s], s))
            cold_s = 0.0 if held[slot] == request.service else cluster.cold_start_s
            idle.discard(slot)
            held[slot] = request.service
            done_s = queue.now_s + cold_s + request.work_s / faster
            used_s[slot] = done_s
            times.add(i, KIND, done_s - request.at_s)
            queue.push(done_s, ("done", slot))

    while len(queue):
        what, which = queue.pop()
        if what == "came":
            waiting.append(which)
        else:
            idle.add(which)
        start()
    times.finished_s = queue.now_s
    return times
