"""Weight relays, live: what agents and trainers say of cargoes becomes events, the director's commands become messages."""

import asyncio
import logging
from collections.abc import Callable

from slackwater.control.weights import commands as do
from slackwater.control.weights import events as on
from slackwater.model.ids import NodeId, WorkerId
from slackwater.runtime.net.hub import WorkerHub
from slackwater.wire import agent as says
from slackwater.wire import messages

logger = logging.getLogger(__name__)


class RelayBody:
    """Where every node's relay listens."""

    def __init__(self, hub: WorkerHub, feed: Callable[[on.WeightEvent], None]) -> None:
        self._hub, self._feed = hub, feed
        self._addresses: dict[NodeId, str] = {}

    def joined(self, facts: says.NodeFacts) -> None:
        """A node's agent has dialled in."""
        if facts.relay:
            node = NodeId(facts.node)
            self._addresses[node] = facts.relay
            self._feed(on.RelayJoined(_now_s(), node, facts.site))

    def lost(self, node: NodeId) -> None:
        """It has gone."""
        if self._addresses.pop(node, None) is not None:
            self._feed(on.RelayLeft(_now_s(), node))

    def said(self, node: NodeId, message: says.CargoArrived | says.CargoBroke) -> None:
        """How an agent fared that was told to bring a cargo."""
        match message:
            case says.CargoArrived(version, base):
                self._feed(on.CargoArrived(_now_s(), node, version, base))
            case says.CargoBroke(version, base, source, error):
                logger.warning("cargo broke off node=%s source=%s: %s", node, source, error)
                broke = on.CargoBroke(_now_s(), node, version, base, NodeId(source), error)
                self._feed(broke)

    def stocked(self, message: messages.VersionStocked) -> None:
        """A trainer put a version on its node's relay."""
        sizes = tuple(sorted(message.sizes.items()))
        self._feed(on.CargoesStocked(_now_s(), NodeId(message.node), message.version, sizes))

    def carry_out(self, command: do.BringCargo | do.DropCargo) -> None:
        """Tell the node's agent."""
        match command:
            case do.BringCargo(node, version, base, source):
                told: messages.Message = says.BringCargo(
                    version, base, source, self._addresses[source]
                )
            case do.DropCargo(node, version, base):
                told = says.DropCargo(version, base)
        self._hub.send(WorkerId(f"agent:{node}"), told)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
