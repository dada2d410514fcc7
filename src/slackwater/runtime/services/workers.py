"""The processes that have joined the service, each in its role, and which body hears what they say."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slackwater.model.errors import ConfigError
from slackwater.model.ids import NodeId, WorkerId
from slackwater.runtime.bodies.actions import ActionsBody
from slackwater.runtime.bodies.operations import OperationsBody
from slackwater.runtime.bodies.rollout import RolloutBody
from slackwater.runtime.launch.fleet import Fleet
from slackwater.runtime.launch.nodes import agent_name
from slackwater.runtime.services.instances import InstanceService
from slackwater.wire import messages
from slackwater.wire.agent import CargoArrived, CargoBroke, StateSent
from slackwater.wire.frames import Frame, FrameKind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hearers:
    """Who is told of workers; `node_lost` when the agent of a node is gone."""

    fleet: Fleet
    rollout: RolloutBody
    training: OperationsBody
    actions: ActionsBody
    instances: InstanceService
    node_lost: Callable[[NodeId], None]


class Workers:
    """What the hub says of connections, passed on; `hearers` are set before the hub listens."""

    def __init__(self) -> None:
        self.hearers: Hearers
        self.stopping = False
        self._roles: dict[WorkerId, str] = {}

    def worker_joined(self, hello: messages.Hello) -> None:
        to, worker = self.hearers, WorkerId(hello.worker)
        if hello.role == "agent":
            if hello.node is None or agent_name(NodeId(hello.node.node)) != worker:
                raise ConfigError.of("hello: worker", worker, "must be agent:NODE of its node")
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
                if isinstance(message, CargoArrived | CargoBroke):
                    to.rollout.relays.said(_node_of(worker), message)
                elif isinstance(message, messages.VersionStocked):
                    to.rollout.relays.stocked(message)
                elif isinstance(message, StateSent):
                    to.training.state_sent(message)
                elif role == "agent":
                    to.fleet.agent_said(_node_of(worker), message)
                else:
                    to.training.trainer_said(worker, message)

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        to = self.hearers
        role = self._roles.pop(worker)
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

    def by_role(self) -> dict[str, list[str]]:
        """Their names; agents are listed as nodes."""
        found: dict[str, list[str]] = {"engine": [], "trainer": [], "sandbox": []}
        for worker, role in sorted(self._roles.items()):
            if role != "agent":
                found.setdefault(role, []).append(worker)
        return found


def _node_of(agent: WorkerId) -> NodeId:
    return NodeId(agent.removeprefix("agent:"))
