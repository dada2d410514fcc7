"""The processes that have joined the service, by role, and who handles their messages."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slackwater.model.ids import NodeId, WorkerId
from slackwater.runtime.executors.actions import ActionExecutor
from slackwater.runtime.executors.engines import EngineExecutor
from slackwater.runtime.executors.trainers import TrainerExecutor
from slackwater.runtime.launch.fleet import LaunchedFleet
from slackwater.runtime.services.instances import InstanceService
from slackwater.wire import messages
from slackwater.wire.agent import PayloadArrived, PayloadFailed, StateSent
from slackwater.wire.frames import Frame, FrameKind
from slackwater.wire.memory import MEMORY_GAUGE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerHandlers:
    """Who is told of workers; `node_lost` when the agent of a node is gone."""

    fleet: LaunchedFleet
    rollout: EngineExecutor
    training: TrainerExecutor
    actions: ActionExecutor
    instances: InstanceService
    node_lost: Callable[[NodeId], None]


class Workers:
    """What the hub says of connections, passed on; `hearers` are set before the hub listens."""

    def __init__(self) -> None:
        self.hearers: WorkerHandlers
        self.stopping = False
        self._roles: dict[WorkerId, str] = {}
        self._memory: dict[WorkerId, float] = {}

    def worker_joined(self, hello: messages.Hello) -> None:
        to, worker = self.hearers, WorkerId(hello.worker)
        if hello.role == "agent":
            assert hello.node is not None  # as the launch plan has checked
            to.fleet.agent_joined(hello.node)
            to.rollout.relays.joined(hello.node)
            to.training.agent_joined(hello.node)
        self._roles[worker] = hello.role
        to.fleet.supervisor.joined(worker)
        logger.info("worker joined worker=%s role=%s", worker, hello.role)
        if hello.role == "trainer":
            to.training.trainer_joined(worker)
        elif hello.sandbox is not None:
            to.actions.worker_joined(worker, hello.sandbox)
        elif hello.rewards is not None:
            to.actions.rewards_joined(worker, hello.rewards)
        elif hello.engine is not None:
            to.rollout.engine_joined(worker, hello.engine)

    def worker_said(self, worker: WorkerId, frames: Sequence[Frame]) -> None:
        to = self.hearers
        for frame in frames:
            role = self._roles[worker]
            if role == "engine":
                to.rollout.engine_said(worker, frame)
            elif role in ("sandbox", "rewards"):
                to.actions.worker_said(worker, frame)
            elif frame.kind is FrameKind.CONTROL:
                message = messages.decode_from_worker(frame.body)
                if isinstance(message, messages.Heartbeat):
                    self._memory[worker] = message.gauges.pop(MEMORY_GAUGE, 0.0)
                if role == "agent":
                    self._agent_said(_node_of(worker), message)
                elif isinstance(message, messages.VersionStocked):
                    self._stocked(worker, message)
                else:
                    to.training.trainer_said(worker, message)

    def _agent_said(self, node: NodeId, message: messages.FromWorker) -> None:
        to = self.hearers
        if isinstance(message, PayloadArrived | PayloadFailed):
            to.rollout.relays.said(node, message)
        elif isinstance(message, StateSent):
            to.training.state_sent(message)
        else:
            to.fleet.agent_said(node, message)

    def _stocked(self, trainer: WorkerId, message: messages.VersionStocked) -> None:
        """A trainer speaks for the relay of its own node alone."""
        if message.node == self.hearers.fleet.nodes.node_of(trainer):
            self.hearers.rollout.relays.stocked(message)
        else:
            logger.warning("worker=%s stocks for another node=%s", trainer, message.node)

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        to = self.hearers
        role = self._roles.pop(worker)
        self._memory.pop(worker, None)
        logger.warning("worker lost worker=%s reason=%s", worker, reason)
        if role == "agent":
            node = _node_of(worker)
            to.rollout.relays.lost(node)
            to.training.agent_lost(node)
            to.fleet.agent_lost(node)
            to.node_lost(node)
            return
        if not (self.stopping and role == "sandbox"):  # which cleans up after itself
            to.fleet.supervisor.kill(worker)
        to.instances.lost(worker)
        if role == "trainer":
            to.training.trainer_lost(worker, reason)
        elif role in ("sandbox", "rewards"):
            to.actions.worker_lost(worker, reason)
        else:
            to.rollout.engine_lost(worker, reason)

    def memory(self) -> dict[WorkerId, float]:
        """The resident bytes that each told of last."""
        told = {**self.hearers.rollout.gauges, **self.hearers.actions.gauges}
        found = {worker: gauges.get(MEMORY_GAUGE, 0.0) for worker, gauges in told.items()}
        return found | self._memory

    def by_role(self) -> dict[str, list[str]]:
        """Their names; agents are listed as nodes."""
        found: dict[str, list[str]] = {"engine": [], "trainer": [], "sandbox": []}
        for worker, role in sorted(self._roles.items()):
            if role != "agent":
                found.setdefault(role, []).append(worker)
        return found


def _node_of(agent: WorkerId) -> NodeId:
    return NodeId(agent.removeprefix("agent:"))
