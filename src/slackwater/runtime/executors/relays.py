"""Weight relays, live: reports on payloads become events, the director's commands messages."""

import logging

from slackwater.control.weights import commands as do
from slackwater.control.weights import events as on
from slackwater.model.ids import NodeId, WorkerId
from slackwater.runtime.fleet_runtime import FleetRuntime
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.net.hub import WorkerHub
from slackwater.wire import agent as says
from slackwater.wire import messages

logger = logging.getLogger(__name__)


class RelayExecutor:
    """Where every node's relay listens, and the certificate that it shows."""

    def __init__(self, hub: WorkerHub, runtime: FleetRuntime) -> None:
        self._hub, self._feed = hub, runtime.feed
        runtime.register(self._execute, (do.FetchPayload, do.DropPayload))
        self._relays: dict[NodeId, tuple[str, str]] = {}

    def joined(self, facts: says.NodeFacts) -> None:
        """A node's agent has dialled in."""
        if facts.relay:
            node = NodeId(facts.node)
            self._relays[node] = (facts.relay, facts.certificate)
            self._feed(on.RelayJoined(loop_time(), node, facts.site))

    def lost(self, node: NodeId) -> None:
        """It has gone."""
        if self._relays.pop(node, None) is not None:
            self._feed(on.RelayLeft(loop_time(), node))

    def said(self, node: NodeId, message: says.PayloadArrived | says.PayloadFailed) -> None:
        """How an agent fared that was told to bring a payload."""
        match message:
            case says.PayloadArrived(version, base):
                self._feed(on.PayloadArrived(loop_time(), node, version, base))
            case says.PayloadFailed(version, base, source, error):
                logger.warning("payload broke off node=%s source=%s: %s", node, source, error)
                broke = on.PayloadFailed(loop_time(), node, version, base, NodeId(source), error)
                self._feed(broke)

    def stocked(self, message: messages.VersionStocked) -> None:
        """A trainer put a version on its node's relay."""
        sizes = tuple(sorted(message.sizes.items()))
        self._feed(on.PayloadsStocked(loop_time(), NodeId(message.node), message.version, sizes))

    def _execute(self, command: do.FetchPayload | do.DropPayload) -> None:
        """Tell the node's agent."""
        match command:
            case do.FetchPayload(node, version, base, source):
                address, certificate = self._relays[source]
                offered = says.OfferPayload(version, base, self._relays[node][1])
                self._hub.send(WorkerId(f"agent:{source}"), offered)
                told: messages.Message = says.FetchPayload(
                    version, base, source, address, certificate
                )
            case do.DropPayload(node, version, base):
                told = says.DropPayload(version, base)
        self._hub.send(WorkerId(f"agent:{node}"), told)
