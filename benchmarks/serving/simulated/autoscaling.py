"""A peer's way: whole nodes change sides by load (bidirectional autoscaling, ROSE 3.2 and 6.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.rollout.simulated.driven_engines import DrivenEngines
from benchmarks.serving.simulated.lending_cluster import LendingCluster, LendingPlan
from slackwater.model.ids import JobId, NodeId
from slackwater.sim.serving.serving_trace import Arrival


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """A node leaves the service below `low` of load for each of them, and comes back above `high`.

    Each change unloads one model and loads another: `reload_s` (ROSE figure 3c: tens of seconds).
    """

    every_s: float = 2.0
    low: float = 0.35
    high: float = 0.6
    reload_s: float = 15.0


class AutoscaledCluster(LendingCluster):
    """Nodes serve or roll out, never both. The cluster's mode must lend; it is asked on closed
    nodes only.
    """

    def __init__(
        self,
        plan: LendingPlan,
        body: DrivenEngines,
        arrivals: Sequence[Arrival],
        rule: ScalingRule | None = None,
    ) -> None:
        super().__init__(plan, body, arrivals)
        self._rule = rule or ScalingRule()
        self._job: JobId | None = None
        self._changing: set[NodeId] = set()
        self._needed_s = dict.fromkeys(self.nodes, 0.0)

    def start(self, period_s: float = 600.0) -> None:
        self._schedule_arrival(0, 0.0, period_s)
        self._scale()

    def want(self, job: JobId, nodes: int) -> None:
        del nodes
        self._job = job

    def release(self, job: JobId) -> None:
        """The job trains: its nodes go back to the service, by and by."""
        del job
        self._job = None
        for name, node in self.nodes.items():
            if not node.open and name not in self._changing:
                self._reopen(name)

    def _borrower_of(self, name: NodeId) -> JobId | None:
        return None if self.nodes[name].open else self._job

    def _scale(self) -> None:
        """Compare what the service needed of its open nodes with what they have."""
        open_nodes = [name for name, node in self.nodes.items() if node.open]
        needed_s = 0.0
        for name, node in self.nodes.items():
            needed_s += node.use.needed_s - self._needed_s[name]
            self._needed_s[name] = node.use.needed_s
        load = needed_s / self._rule.every_s / max(len(open_nodes), 1)
        waiting = sum(len(self.nodes[name].service.queue) for name in open_nodes)
        closed = [name for name, node in self.nodes.items() if not node.open]
        idle = [name for name in closed if name not in self._changing]
        if (load > self._rule.high or waiting > 4 * len(open_nodes)) and idle:
            self._reopen(idle[0])
        elif self._job is not None and load < self._rule.low and len(open_nodes) > 1:
            self._close(min(open_nodes, key=lambda name: self.nodes[name].load))
        self.body.schedule(self.body.now_s + self._rule.every_s, self._scale)

    def _close(self, name: NodeId) -> None:
        self.nodes[name].open = False
        self._changing.add(name)
        self._when_drained(name)

    def _when_drained(self, name: NodeId) -> None:
        if self.nodes[name].service.busy:
            self.body.schedule(self.body.now_s + 0.5, partial(self._when_drained, name))
            return
        self.body.schedule(self.body.now_s + self._rule.reload_s, partial(self._roll_out, name))

    def _roll_out(self, name: NodeId) -> None:
        self._changing.discard(name)
        if self._job is None:
            self._reopen(name)
        else:
            self._activate(name, self._job)

    def _reopen(self, name: NodeId) -> None:
        self._changing.add(name)
        self._take_back(name)
        self.body.schedule(self.body.now_s + self._rule.reload_s, partial(self._opened, name))

    def _opened(self, name: NodeId) -> None:
        self._changing.discard(name)
        self.nodes[name].open = True
