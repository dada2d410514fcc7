"""Moves and prefetches models' states between nodes, by orders to their agents."""

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slackwater.control.operations import commands
from slackwater.model.ids import NodeId, WorkerId
from slackwater.runtime.net.hub import WorkerHub
from slackwater.wire import agent as agent_messages
from slackwater.wire.agent import agent_name

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StateMoves:
    """The nodes with a state manager, and where each receives states."""

    hub: WorkerHub
    node_of: Callable[[WorkerId], NodeId | None]
    _places: dict[NodeId, agent_messages.StatePlace] = field(default_factory=dict)

    def add_node(self, facts: agent_messages.NodeFacts) -> None:
        if facts.states is not None:
            self._places[NodeId(facts.node)] = facts.states

    def remove_node(self, node: NodeId) -> None:
        self._places.pop(node, None)

    def prefetch(self, wanted: Iterable[tuple[Mapping[WorkerId, Sequence[str]], bool]]) -> None:
        """Have nodes load the states of models, in this order, before their trainers need them.

        Models come by trainer; True with those whose job holds the trainers now.
        """
        if not self._places:
            return
        hints: dict[NodeId, agent_messages.PrefetchStates] = {}
        for models_by_trainer, is_holding in wanted:
            for worker, models in models_by_trainer.items():
                node = self.node_of(worker)
                if node in self._places:
                    hint = hints.setdefault(node, agent_messages.PrefetchStates([], []))
                    hint.models.extend(models)
                    hint.holding.extend(models if is_holding else ())
        for node, hint in hints.items():
            self.hub.send(agent_name(node), hint)

    def begin(self, order: commands.MoveState) -> str:
        """Start a move. Returns why it is impossible, or "": then the agent reports the outcome."""
        source, target = self.node_of(order.worker), self.node_of(order.to)
        if source is None or source not in self._places:
            return f"the node of {order.worker} keeps no states"
        if target is None or target not in self._places:
            return f"the node of {order.to} takes no states"
        logger.info("state moves model=%s from=%s to=%s", order.model, source, target)
        place, key = self._places[target], secrets.token_urlsafe(32)
        self.hub.send(agent_name(target), agent_messages.TakeState(order.model, key))
        self.hub.send(
            agent_name(source), agent_messages.SendState(order.ticket, order.model, place, key)
        )
        return ""

    def delete_strays(self, model: str) -> None:
        for node in self._places:
            self.hub.send(agent_name(node), agent_messages.ForgetStates(model))
