"""The peer: a pod per trajectory, as Kubernetes runs it (ARL-Tangram 6.1).

A pod asks for half a core and may use four. It is placed once, by what it asks for, starts when its
node gets to it, and lives as long as its trajectory. Pods on a node share its cores as the kernel's
fair scheduler does: equal shares, no one above his limit.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from benchmarks.actions.simulated.cpu_run import CpuCluster
from benchmarks.actions.simulated.times import ActionTimes
from benchmarks.actions.simulated.workload import REWARD, CodingWorkload, Step
from slackwater.sim.core.queue import EventQueue


@dataclass(frozen=True, slots=True)
class PodRules:
    """`per_node`: one block of 256 addresses is what a node gets by default (the documented design
    point is 110, which would be harsher). `start_s`: a kubelet starts pods one after the other at
    five a second. `exec_s`: a command goes through the API server and the kubelet.
    """

    request: float = 0.5
    limit: int = 4
    per_node: int = 256
    start_s: float = 0.2
    exec_s: float = 0.1
    schedule_s: float = 0.01


@dataclass(slots=True)
class _Node:
    """Processor sharing on one node: who runs, how much is left, and since when the rates hold."""

    cores: int
    room: int
    starting_until_s: float = 0.0
    since_s: float = 0.0
    epoch: int = 0
    left: dict[int, float] = field(default_factory=dict)
    most: dict[int, int] = field(default_factory=dict)
    rate: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Pod:
    steps: Sequence[Step]
    at: int = 0
    submitted_s: float = 0.0
    node: int | None = None
    ready: bool = False
    wants: bool = False


class PodRun:
    """One run of a batch of trajectories, each with its pod."""

    def __init__(self, cluster: CpuCluster, workload: CodingWorkload, rules: PodRules) -> None:
        self._rules, self._workload = rules, workload
        room = min(int(cluster.cores / rules.request), rules.per_node)
        self._nodes = [_Node(cluster.cores, room) for _ in range(cluster.nodes)]
        self._queue: EventQueue[Callable[[], None]] = EventQueue()
        self._waiting: deque[int] = deque()
        self._pods: list[_Pod] = []
        self._scheduler_until_s = 0.0
        self._efficiency = workload.efficiency
        self.times = ActionTimes()

    def run(self, trajectories: Sequence[Sequence[Step]]) -> ActionTimes:
        """All trajectories begin at once and ask for their pods at once."""
        self._pods = [_Pod(steps) for steps in trajectories]
        self._waiting.extend(range(len(trajectories)))
        self._place()
        for i in range(len(trajectories)):
            self._think(i)
        while len(self._queue):
            self._queue.pop()()
        self.times.finished_s = self._queue.now_s
        return self.times

    # ---- pods ----
    def _place(self) -> None:
        while self._waiting:
            node = max(range(len(self._nodes)), key=lambda n: self._nodes[n].room)
            if self._nodes[node].room < 1:
                return
            i = self._waiting.popleft()
            self._nodes[node].room -= 1
            self._pods[i].node = node
            now_s = self._queue.now_s
            self._scheduler_until_s = max(self._scheduler_until_s, now_s) + self._rules.schedule_s
            begins_s = max(self._scheduler_until_s, self._nodes[node].starting_until_s)
            self._nodes[node].starting_until_s = begins_s + self._rules.start_s
            self._queue.push(begins_s + self._rules.start_s, partial(self._started, i))

    def _started(self, i: int) -> None:
        pod = self._pods[i]
        pod.ready = True
        if pod.wants:
            self._exec(i)

    def _think(self, i: int) -> None:
        pod = self._pods[i]
        at_s = self._queue.now_s + pod.steps[pod.at].think_s
        self._queue.push(at_s, lambda: self._act(i))

    def _act(self, i: int) -> None:
        pod = self._pods[i]
        pod.submitted_s, pod.wants = self._queue.now_s, True
        if pod.ready:
            self._exec(i)

    def _exec(self, i: int) -> None:
        self._pods[i].wants = False
        self._queue.push(self._queue.now_s + self._rules.exec_s, lambda: self._begin(i))

    # ---- sharing cores ----
    def _begin(self, i: int) -> None:
        pod = self._pods[i]
        assert pod.node is not None
        node = self._nodes[pod.node]
        self._advance(node)
        step = pod.steps[pod.at]
        node.left[i] = step.work_s
        node.most[i] = self._rules.limit if step.kind == REWARD else 1
        self._reshare(pod.node)

    def _advance(self, node: _Node) -> None:
        passed_s = self._queue.now_s - node.since_s
        node.since_s = self._queue.now_s
        for i, rate in node.rate.items():
            node.left[i] -= rate * passed_s

    def _reshare(self, number: int) -> None:
        """Everybody's rate from now on, and when the first will be done."""
        node = self._nodes[number]
        node.epoch += 1
        node.rate = {}
        if not node.left:
            return
        level = fair_level(list(node.most.values()), node.cores)
        speeds = {most: self._speed(min(level, most)) for most in set(node.most.values())}
        node.rate = {i: speeds[most] for i, most in node.most.items()}
        first = min(node.left, key=lambda i: node.left[i] / node.rate[i])
        wait_s = max(node.left[first] / node.rate[first], 0.0)
        epoch = node.epoch
        self._queue.push(self._queue.now_s + wait_s, lambda: self._done(number, first, epoch))

    def _speed(self, cores: float) -> float:
        """How much of one core's work is done in a second on a share of cores, whole or not."""
        if cores <= 1:
            return cores
        whole = int(cores)
        low, high = self._efficiency.speedup(whole), self._efficiency.speedup(whole + 1)
        return low + (high - low) * (cores - whole)

    def _done(self, number: int, i: int, epoch: int) -> None:
        node = self._nodes[number]
        if node.epoch != epoch:
            return
        self._advance(node)
        del node.left[i], node.most[i]
        self._reshare(number)
        pod = self._pods[i]
        self.times.add(i, pod.steps[pod.at].kind, self._queue.now_s - pod.submitted_s)
        pod.at += 1
        if pod.at < len(pod.steps):
            self._think(i)
            return
        node.room += 1
        self._place()


def fair_level(most: Sequence[int], cores: int) -> float:
    """The share that fills the cores when nobody takes more than his limit."""
    wants = np.sort(np.asarray(most, dtype=np.float64))
    if wants.sum() <= cores:
        return float(wants[-1])
    left = float(cores)
    for done, want in enumerate(wants):
        level = left / (len(wants) - done)
        if want >= level:
            return level
        left -= float(want)
    return float(wants[-1])
