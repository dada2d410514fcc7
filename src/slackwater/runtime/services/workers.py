"""Routes the hub's events and messages to the executor of each worker's role."""

import logging
from collections.abc import Callable, Sequence

from slackwater.model.ids import InstanceId, NodeId, WorkerId
from slackwater.runtime.executors.actions import ActionExecutor
from slackwater.runtime.executors.engines import EngineExecutor
from slackwater.runtime.executors.trainers import TrainerExecutor
from slackwater.runtime.launch.fleet import LaunchedFleet
from slackwater.runtime.services.instances import InstanceService
from slackwater.wire import messages
from slackwater.wire.agent import (
    AGENT_PREFIX,
    NodeLeaving,
    PayloadArrived,
    PayloadFailed,
    StateSent,
)
from slackwater.wire.frames import Frame, FrameKind
from slackwater.wire.memory import MEMORY_GAUGE

logger = logging.getLogger(__name__)


class Workers:
    """Knows the role of every connected worker; `node_lost` is called when an agent is gone."""

    def __init__(
        self,
        fleet: LaunchedFleet,
        rollout: EngineExecutor,
        training: TrainerExecutor,
        actions: ActionExecutor,
        instances: InstanceService,
        *,
        node_joined: Callable[[NodeId], None],
        node_lost: Callable[[NodeId], None],
    ) -> None:
        self._fleet, self._rollout, self._training = fleet, rollout, training
        self._actions, self._instances = actions, instances
        self._node_joined, self._node_lost = node_joined, node_lost
        self._stopping = False
        self._roles: dict[WorkerId, str] = {}
        self._memory: dict[WorkerId, float] = {}
        self._leaving_engines: dict[NodeId, set[WorkerId]] = {}  # engines whose turns still move

    def stop(self) -> None:
        """The service stops: leave sandbox workers, which clean up after themselves."""
        self._stopping = True

    def worker_joined(self, hello: messages.Hello) -> None:
        worker = WorkerId(hello.worker)
        if hello.role == "agent":
            assert hello.node is not None  # checked by the launch plan
            self._fleet.agent_joined(hello.node)
            self._rollout.relays.add_node(hello.node)
            self._training.moves.add_node(hello.node)
            self._node_joined(NodeId(hello.node.node))
        self._roles[worker] = hello.role
        self._fleet.supervisor.record_join(worker)
        logger.info("worker joined worker=%s role=%s", worker, hello.role)
        if hello.role == "trainer":
            self._training.trainer_joined(worker)
        elif hello.sandbox is not None:
            self._actions.worker_joined(worker, hello.sandbox)
        elif hello.rewards is not None:
            self._actions.rewards_joined(worker, hello.rewards)
        elif hello.engine is not None:
            self._rollout.engine_joined(worker, hello.engine)

    def handle_frames(self, worker: WorkerId, frames: Sequence[Frame]) -> None:
        for frame in frames:
            role = self._roles[worker]
            if role == "engine":
                self._rollout.handle_frame(worker, frame)
            elif role in ("sandbox", "rewards"):
                self._actions.handle_frame(worker, frame)
            elif frame.kind is FrameKind.CONTROL:
                message = messages.decode_from_worker(frame.body)
                if isinstance(message, messages.Heartbeat):
                    self._memory[worker] = message.gauges.pop(MEMORY_GAUGE, 0.0)
                if role == "agent":
                    self._handle_agent_message(_node_of(worker), message)
                elif isinstance(message, messages.VersionStocked):
                    self._record_stock(worker, message)
                else:
                    self._training.handle_message(worker, message)

    def _handle_agent_message(self, node: NodeId, message: messages.FromWorker) -> None:
        if isinstance(message, PayloadArrived | PayloadFailed):
            self._rollout.relays.handle_report(node, message)
        elif isinstance(message, StateSent):
            self._training.state_sent(message)
        elif isinstance(message, NodeLeaving):
            self.node_leaving(node, message.leaves_in_s)
        else:
            self._fleet.handle_agent_message(node, message)

    def node_leaving(self, node: NodeId, leaves_in_s: float) -> None:
        """Move the turns of the node's engines, and dismiss its agent when they are empty."""
        logger.warning("node leaves node=%s in_s=%.1f", node, leaves_in_s)
        workers = self._fleet.agent_leaving(node)
        engines = {worker for worker in workers if self._roles.get(worker) == "engine"}
        self._leaving_engines[node] = engines
        for engine in sorted(engines):
            self._rollout.give_notice(InstanceId(engine), leaves_in_s)
        self._dismiss_empty()

    def _dismiss_empty(self) -> None:
        for node in [node for node, engines in self._leaving_engines.items() if not engines]:
            del self._leaving_engines[node]
            self._fleet.dismiss(node)

    def _record_stock(self, trainer: WorkerId, message: messages.VersionStocked) -> None:
        """Accept a stock report only from a trainer of that node."""
        if message.node == self._fleet.nodes.node_of(trainer):
            self._rollout.relays.record_stock(message)
        else:
            logger.warning("worker=%s stocks for another node=%s", trainer, message.node)

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        role = self._roles.pop(worker)
        self._memory.pop(worker, None)
        level = logging.INFO if self._stopping else logging.WARNING
        logger.log(level, "worker lost worker=%s reason=%s", worker, reason)
        if role == "agent":
            node = _node_of(worker)
            self._leaving_engines.pop(node, None)
            self._rollout.relays.remove_node(node)
            self._training.moves.remove_node(node)
            self._fleet.agent_lost(node)
            self._node_lost(node)
            return
        if not (self._stopping and role == "sandbox"):
            self._fleet.supervisor.kill(worker)
        self._instances.kill_child(worker)
        if role == "trainer":
            self._training.trainer_lost(worker, reason)
        elif role in ("sandbox", "rewards"):
            self._actions.worker_lost(worker, reason)
        else:
            self._rollout.engine_lost(worker, reason)
            for engines in self._leaving_engines.values():
                engines.discard(worker)
            self._dismiss_empty()

    def memory(self) -> dict[WorkerId, float]:
        """Resident bytes of each worker, by its last heartbeat."""
        gauges_by_worker = {**self._rollout.gauges, **self._actions.gauges}
        found = {
            worker: gauges.get(MEMORY_GAUGE, 0.0) for worker, gauges in gauges_by_worker.items()
        }
        return found | self._memory

    def names_by_role(self) -> dict[str, list[str]]:
        """Names of workers by role, without agents."""
        found: dict[str, list[str]] = {"engine": [], "trainer": [], "sandbox": []}
        for worker, role in sorted(self._roles.items()):
            if role != "agent":
                found.setdefault(role, []).append(worker)
        return found


def _node_of(agent: WorkerId) -> NodeId:
    return NodeId(agent.removeprefix(AGENT_PREFIX))
