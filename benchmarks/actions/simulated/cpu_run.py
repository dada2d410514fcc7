"""Trajectories over the action broker in virtual time: environments on nodes, cores by the
action.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.actions.simulated.times import ActionTimes
from benchmarks.actions.simulated.workload import REWARD, CodingWorkload, Step
from slackwater.control.actions import commands as do
from slackwater.control.actions import events as on
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.broker_state import BrokerSettings
from slackwater.model.action import ActionSpec, EnvironmentSpec, OutcomeKind, WorkerCapacity
from slackwater.model.amounts import CORES, Amounts, Elastic, Need
from slackwater.model.ids import ActionId, EnvironmentId, JobId, NodeId
from slackwater.sim.core.queue import EventQueue

JOB = JobId("coding")
_ONE_CORE = (Need(CORES, Amounts.exactly(1)),)


@dataclass(frozen=True, slots=True)
class CpuCluster:
    """Nodes of cores, and what our body costs: one environment after the other opens on a node, and
    every action is prepared.

    Defaults: ARL-Tangram 6.3 (five nodes of 256 cores and 2.4 TB); a container made by runc takes
    39 ms; preparing a command in a bubblewrap sandbox 15 ms.
    """

    nodes: int = 5
    cores: int = 256
    numa_nodes: int = 2
    memory_mib: int = 2_400_000
    open_s: float = 0.04
    overhead_s: float = 0.015

    def capacity(self) -> WorkerCapacity:
        each = self.cores // self.numa_nodes
        numa = tuple(tuple(range(i * each, (i + 1) * each)) for i in range(self.numa_nodes))
        return WorkerCapacity(numa, self.memory_mib)


@dataclass(slots=True)
class _Trajectory:
    steps: Sequence[Step]
    at: int = 0
    submitted_s: float = 0.0


@dataclass(slots=True)
class CpuRun:
    """One run; `clock`, if given, measures how long the broker takes for every event."""

    cluster: CpuCluster
    workload: CodingWorkload
    settings: BrokerSettings
    clock: Callable[[], float] | None = None
    known: bool = True
    times: ActionTimes = field(default_factory=ActionTimes)
    _queue: EventQueue[Callable[[], None]] = field(default_factory=EventQueue)
    _trajectories: list[_Trajectory] = field(default_factory=list)
    _opening_until_s: dict[NodeId, float] = field(default_factory=dict)

    def run(self, trajectories: Sequence[Sequence[Step]]) -> ActionTimes:
        """All trajectories begin at once, as the rollout of one RL step does."""
        broker = ActionBroker(self.settings)
        for i in range(self.cluster.nodes):
            self._tell(broker, on.WorkerJoined(0.0, NodeId(f"n{i}"), self.cluster.capacity()))
        self._trajectories = [_Trajectory(steps) for steps in trajectories]
        for i in range(len(trajectories)):
            spec = EnvironmentSpec(EnvironmentId(str(i)), JOB, self.workload.memory_mib)
            self._tell(broker, on.EnvironmentRequested(0.0, spec))
            self._think(broker, i)
        while len(self._queue):
            self._queue.pop()()
        self.times.finished_s = self._queue.now_s
        return self.times

    def _think(self, broker: ActionBroker, i: int) -> None:
        trajectory = self._trajectories[i]
        at_s = self._queue.now_s + trajectory.steps[trajectory.at].think_s
        self._queue.push(at_s, lambda: self._act(broker, i))

    def _act(self, broker: ActionBroker, i: int) -> None:
        trajectory = self._trajectories[i]
        step = trajectory.steps[trajectory.at]
        trajectory.submitted_s = self._queue.now_s
        name, home = ActionId(f"{i}:{trajectory.at}"), EnvironmentId(str(i))
        spec = ActionSpec(name, JOB, step.kind, _ONE_CORE, home)
        if step.kind == REWARD:
            needs = (Need(CORES, Amounts.from_range(1, self.workload.most_cores)),)
            elastic = Elastic(CORES, self.workload.efficiency)
            profiled = step.work_s if self.known else None
            spec = ActionSpec(
                name, JOB, step.kind, needs, home, elastic=elastic, single_unit_s=profiled
            )
        self._tell(broker, on.ActionSubmitted(self._queue.now_s, spec))

    def _tell(self, broker: ActionBroker, event: on.Event) -> None:
        if self.clock is None:
            commands = broker.handle(event)
        else:
            began_s = self.clock()
            commands = broker.handle(event)
            self.times.decision_s.append(self.clock() - began_s)
        for command in commands:
            self._execute(broker, command)

    def _execute(self, broker: ActionBroker, command: do.Command) -> None:
        now_s = self._queue.now_s
        match command:
            case do.OpenEnvironment(node, spec):
                done_s = max(self._opening_until_s.get(node, 0.0), now_s) + self.cluster.open_s
                self._opening_until_s[node] = done_s
                name = spec.environment
                self._queue.push(
                    done_s, lambda: self._tell(broker, on.EnvironmentOpened(done_s, name))
                )
            case do.StartAction(spec, attempt, grant):
                self._start(broker, spec, attempt, grant.amount(CORES))
            case do.EndAction(action, outcome):
                self._ended(broker, action, outcome.kind)

    def _start(self, broker: ActionBroker, spec: ActionSpec, attempt: int, cores: int) -> None:
        i, at = (int(part) for part in spec.action.split(":"))
        step = self._trajectories[i].steps[at]
        faster = self.workload.efficiency.speedup(cores) if spec.elastic else 1.0
        ran_s = step.work_s / faster
        done_s = self._queue.now_s + self.cluster.overhead_s + ran_s
        event = on.ActionFinished(done_s, spec.action, attempt, OutcomeKind.DONE, ran_s)
        self._queue.push(done_s, lambda: self._tell(broker, event))

    def _ended(self, broker: ActionBroker, action: ActionId, kind: OutcomeKind) -> None:
        i, at = (int(part) for part in action.split(":"))
        trajectory = self._trajectories[i]
        took_s = self._queue.now_s - trajectory.submitted_s
        self.times.add(i, trajectory.steps[at].kind, took_s)
        self.times.failed += kind is not OutcomeKind.DONE
        trajectory.at += 1
        if trajectory.at < len(trajectory.steps):
            self._think(broker, i)
        else:
            closed = on.EnvironmentClosed(self._queue.now_s, EnvironmentId(str(i)))
            self._queue.push(self._queue.now_s, lambda: self._tell(broker, closed))
