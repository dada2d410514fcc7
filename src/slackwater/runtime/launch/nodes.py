"""The nodes whose agents are connected, and the worker processes that run on them."""

import asyncio
import logging
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slackwater.model.errors import UnavailableError
from slackwater.model.ids import NodeId, WorkerId
from slackwater.runtime.launch.launch_plan import LaunchPlan
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.runtime.net.hub import WorkerHub
from slackwater.wire import agent as agent_messages
from slackwater.wire import messages
from slackwater.wire.agent import agent_name

logger = logging.getLogger(__name__)

_LOST_WITH_ITS_NODE = -int(signal.SIGKILL)


class NodeProcess:
    """A worker's process on a node, as its agent reports it."""

    def __init__(self, node: NodeId, worker: WorkerId, send: Callable[[messages.Message], None]):
        self.node = node
        self.worker = worker
        self.pid = 0
        self.returncode: int | None = None
        self.output = ""
        self._send = send
        self._ended = asyncio.Event()

    def send_signal(self, number: int) -> None:
        """Pass a signal on; nothing happens if the process has ended."""
        if self.returncode is None:
            self._send(agent_messages.SignalWorker(self.worker, int(number)))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, status: int, output: str = "") -> None:
        """The agent said so, or the node was lost."""
        self.returncode = status
        self.output = output
        self._ended.set()


@dataclass(slots=True)
class Node:
    """A connected node."""

    facts: agent_messages.NodeFacts
    joined_s: float
    leaving: bool = False
    processes: dict[WorkerId, NodeProcess] = field(default_factory=dict)
    adoptable: dict[str, agent_messages.RunningWorker] = field(default_factory=dict)  # by plan
    states: dict[str, float] = field(default_factory=dict)  # what its state manager counts
    heartbeats: int = 0  # how often it has said so


class Nodes:
    """The connected nodes; the processes of a lost node count as ended."""

    def __init__(self, hub: WorkerHub, plan: LaunchPlan) -> None:
        self._hub = hub
        self._plan = plan
        self._nodes: dict[NodeId, Node] = {}
        self._starting: dict[WorkerId, asyncio.Future[int]] = {}

    def names(self) -> tuple[NodeId, ...]:
        return tuple(sorted(self._nodes))

    def node_of(self, worker: WorkerId) -> NodeId | None:
        return next((name for name, n in self._nodes.items() if worker in n.processes), None)

    def add(self, facts: agent_messages.NodeFacts, now_s: float) -> NodeId:
        node = NodeId(facts.node)
        adoptable = {
            running.order.log: running for running in facts.running if _has_number(running)
        }
        self._nodes[node] = Node(facts, now_s, adoptable=adoptable)
        self._plan.node_joined(facts)
        logger.info("node joined node=%s cores=%d pool=%s", node, facts.cores, facts.pool)
        return node

    def remove(self, node: NodeId) -> None:
        """Remove a node, and end its workers and their connections."""
        gone = self._nodes.pop(node)
        self._plan.node_lost(node)
        for process in list(gone.processes.values()):
            self._plan.forget(process.worker)
            self._fail_start(process.worker, f"node {node} was lost")
            process.end(_LOST_WITH_ITS_NODE)
            self._hub.hang_up(process.worker)

    def mark_leaving(self, node: NodeId) -> tuple[WorkerId, ...]:
        """Start no more workers on a node that leaves soon; returns its workers."""
        self._nodes[node].leaving = True
        return self.workers(node)

    def handle_message(self, node: NodeId, message: messages.FromWorker) -> None:
        here = self._nodes[node]
        match message:
            case agent_messages.WorkerStarted(worker, pid) if WorkerId(worker) in here.processes:
                starting = self._starting.pop(WorkerId(worker), None)
                if starting is not None and not starting.done():
                    starting.set_result(pid)
            case agent_messages.WorkerNotStarted(worker, error):
                if here.processes.pop(WorkerId(worker), None) is not None:
                    self._plan.forget(WorkerId(worker))
                    self._fail_start(WorkerId(worker), error)
            case agent_messages.WorkerEnded(worker, status, said):
                process = here.processes.pop(WorkerId(worker), None)
                if process is not None:
                    self._plan.forget(WorkerId(worker))
                    process.end(status, said)
            case messages.Heartbeat(gauges):
                here.states, here.heartbeats = gauges, here.heartbeats + 1
            case _:
                logger.warning("not from an agent: %s", type(message).__name__)

    def _fail_start(self, worker: WorkerId, error: str) -> None:
        starting = self._starting.pop(worker, None)
        if starting is not None and not starting.done():
            starting.set_exception(UnavailableError(f"worker {worker}: {error}"))

    def workers(self, node: NodeId) -> tuple[WorkerId, ...]:
        return tuple(self._nodes[node].processes)

    def least_busy(self, among: Sequence[NodeId] = ()) -> NodeId:
        """The node with the fewest worker processes, of some if any; else UnavailableError."""
        if not self._nodes:
            raise UnavailableError("no node of the fleet is here; see `slackwater node list`")
        nodes = among or self.names()
        nodes = [node for node in nodes if not self._nodes[node].leaving] or nodes
        return min(nodes, key=lambda node: (len(self._nodes[node].processes), node))

    def adopt(self, node: NodeId, plan: WorkerPlan) -> NodeProcess | None:
        """Adopt a plan's worker of an earlier control plane; kill it if its order differs."""
        here = self._nodes.get(node)
        running = None if here is None else here.adoptable.pop(plan.name, None)
        if here is None or running is None:
            return None
        worker = WorkerId(running.order.worker)
        process = NodeProcess(node, worker, partial(self._hub.send, agent_name(node)))
        process.pid = running.pid
        here.processes[worker] = process
        if running.order != _order(worker, plan, running.order.key):
            process.kill()
        else:
            self._plan.expect(node, plan, worker, running.order.key)
            logger.info("worker adopted worker=%s pid=%d", worker, running.pid)
        return process

    def end_unplanned(self, node: NodeId, planned: Collection[str]) -> None:
        here = self._nodes[node]
        for name in here.adoptable.keys() - planned:
            worker = WorkerId(here.adoptable.pop(name).order.worker)
            self._hub.send(agent_name(node), agent_messages.SignalWorker(worker, signal.SIGKILL))

    async def spawn(self, node: NodeId, plan: WorkerPlan, worker: WorkerId) -> NodeProcess:
        """Start a worker on a node, and wait until its process runs."""
        here = self._nodes.get(node)
        if here is None:
            raise UnavailableError(f"node {node}: is not here")
        send = partial(self._hub.send, agent_name(node))
        process = NodeProcess(node, worker, send)
        here.processes[worker] = process
        starting = self._starting[worker] = asyncio.get_running_loop().create_future()
        send(_order(worker, plan, self._plan.expect(node, plan, worker)))
        process.pid = await starting
        return process

    def rows(self, now_s: float) -> list[dict[str, Any]]:
        """One row per connected node, for status pages."""
        return [
            {
                "node": name,
                "pool": node.facts.pool,
                "host": node.facts.host,
                "cores": node.facts.cores,
                "memory_mb": node.facts.memory_mb,
                "agent_pid": node.facts.pid,
                "here_s": round(now_s - node.joined_s, 1),
                "heartbeats": node.heartbeats,
                "workers": sorted(node.processes),
                **({"states": node.states} if node.states else {}),
            }
            for name, node in sorted(self._nodes.items())
        ]


def _order(worker: WorkerId, plan: WorkerPlan, key: str) -> agent_messages.StartWorker:
    return agent_messages.StartWorker(
        worker=worker,
        log=plan.name,
        module=plan.module,
        arguments=list(plan.arguments),
        key=key,
        devices=plan.devices,
        layout=plan.layout or "",
        grace_s=plan.grace_s,
        one_process=plan.one_process,
    )


def _has_number(running: agent_messages.RunningWorker) -> bool:
    """Whether its name is one that a supervisor gave it."""
    name, _, number = running.order.worker.rpartition(".")
    return name == running.order.log and number.isdecimal() and len(number) < 10
