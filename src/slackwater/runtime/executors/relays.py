"""Weight relays of nodes: sends them the weight director's commands, and feeds it their reports."""

import logging

from slackwater.control.weights import commands, events
from slackwater.model.ids import NodeId
from slackwater.model.payload import Payload
from slackwater.runtime.live_driver import FleetDriver, loop_time
from slackwater.runtime.net.hub import WorkerHub
from slackwater.wire import agent as agent_messages
from slackwater.wire import messages
from slackwater.wire.agent import agent_name

logger = logging.getLogger(__name__)


class RelayExecutor:
    """All nodes' relays, by the addresses and certificates that their agents report."""

    def __init__(self, hub: WorkerHub, driver: FleetDriver) -> None:
        self._hub, self._feed = hub, driver.feed
        driver.register(self._execute, (commands.FetchPayload, commands.DropPayload))
        self._relays: dict[NodeId, tuple[str, str]] = {}

    def add_node(self, facts: agent_messages.NodeFacts) -> None:
        if facts.relay:
            node = NodeId(facts.node)
            self._relays[node] = (facts.relay, facts.certificate)
            self._feed(events.RelayJoined(loop_time(), node, facts.site))

    def remove_node(self, node: NodeId) -> None:
        if self._relays.pop(node, None) is not None:
            self._feed(events.RelayLeft(loop_time(), node))

    def handle_report(
        self, node: NodeId, message: agent_messages.PayloadArrived | agent_messages.PayloadFailed
    ) -> None:
        """An agent reports how fetching a payload ended."""
        match message:
            case agent_messages.PayloadArrived(Payload(version, base)):
                self._feed(events.PayloadArrived(loop_time(), node, version, base))
            case agent_messages.PayloadFailed(Payload(version, base), source, error):
                logger.warning("payload broke off node=%s source=%s: %s", node, source, error)
                failed = (node, version, base, NodeId(source), error)
                self._feed(events.PayloadFailed(loop_time(), *failed))

    def record_stock(self, message: messages.VersionStocked) -> None:
        """A trainer put a version on its node's relay."""
        sizes = tuple(sorted(message.sizes.items()))
        self._feed(
            events.PayloadsStocked(loop_time(), NodeId(message.node), message.version, sizes)
        )

    def _execute(self, command: commands.FetchPayload | commands.DropPayload) -> None:
        match command:
            case commands.FetchPayload(node, version, base, source):
                payload = Payload(version, base)
                offered = agent_messages.OfferPayload(payload, self._relays[node][1])
                self._hub.send(agent_name(source), offered)
                fetched = agent_messages.FetchPayload(payload, source, *self._relays[source])
                self._hub.send(agent_name(node), fetched)
            case commands.DropPayload(node, version, base):
                dropped = agent_messages.DropPayload(Payload(version, base))
                self._hub.send(agent_name(node), dropped)
