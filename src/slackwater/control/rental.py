"""Rents nodes that jobs can use or the co-scheduler places jobs on, within providers' budgets."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from slackwater.control.coschedule.commands import RentNodes, ReturnNodes
from slackwater.control.message import TimedMessage
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId, NodeId

_TIMER = "rental"
_BEFORE = JobId("")
_LEAST_H = 0.1  # a node is rented only if the budget lasts so long with it
_RETURN_S = 60.0  # how long a node may cost after it was returned
_LOOK_S = 1.0  # the least time between two looks at budgets


@dataclass(frozen=True, slots=True)
class RentalTerms:
    """A provider's nodes: their price, the most that all of them may cost, the engines on each, and
    after how long without a job that wants them they are returned.
    """

    price_per_h: float = 0.0
    budget: float = math.inf
    instances_per_node: int = 1
    idle_s: float = math.inf


class NodeOffered(TimedMessage, frozen=True):
    """A provider has a node that can be rented."""

    node: NodeId
    provider: str = ""


class NodeWithdrawn(TimedMessage, frozen=True):
    """A node cannot be had, or was taken away; it costs nothing from now on."""

    node: NodeId


class RentalAdopted(TimedMessage, frozen=True):
    """An offered node has been rented since `since_s`, by the control plane before."""

    node: NodeId
    since_s: float


class InstancesLimited(TimedMessage, frozen=True):
    """A job can use `most` remote instances; `others` are here that nobody rents."""

    job: JobId
    most: int
    others: int = 0


class NodesNeeded(TimedMessage, frozen=True):
    """The co-scheduler has placed jobs on exactly these nodes."""

    nodes: tuple[NodeId, ...]


RentalEvent: TypeAlias = (
    NodeOffered | NodeWithdrawn | RentalAdopted | InstancesLimited | NodesNeeded | TimerFired
)
RentalCommand: TypeAlias = RentNodes | ReturnNodes | SetTimer


class RentalController:
    """Keeps rented nodes while any job wants instances: a start costs more than a return saves."""

    def __init__(
        self, terms: Mapping[str, RentalTerms], spent: Mapping[str, float] | None = None
    ) -> None:
        self._terms = dict(terms)
        self._spent = dict.fromkeys(terms, 0.0) | dict(spent or {})
        self._offered: dict[NodeId, str] = {}
        self._rented: dict[NodeId, float] = {}
        self._limits: dict[JobId, InstancesLimited] = {}
        self._needed: frozenset[NodeId] = frozenset()

    @property
    def rented(self) -> tuple[NodeId, ...]:
        """Nodes that cost now."""
        return tuple(self._rented)

    @property
    def ended_cost(self) -> dict[str, float]:
        """What each provider's nodes have cost at most that are not rented any more."""
        return dict(self._spent)

    def cost_of(self, provider: str, now_s: float) -> float:
        """What its nodes have cost so far."""
        price = self._terms[provider].price_per_h
        running = sum(now_s - since_s for _, since_s in self._nodes_of(provider))
        return self._spent[provider] + price * running / 3600

    def handle(self, event: RentalEvent) -> list[RentalCommand]:
        now_s = event.now_s
        match event:
            case NodeOffered(_, node, provider):
                self._offered[node] = provider
            case NodeWithdrawn(_, node):
                self._end(node, now_s)
                self._offered.pop(node, None)
            case RentalAdopted(_, node, since_s):
                self._rented[node] = since_s
                # Whether jobs still want it is known after their next steps.
                self._limits[_BEFORE] = InstancesLimited(now_s, _BEFORE, len(self._rented))
            case InstancesLimited(_, job):
                self._limits[job] = event
            case NodesNeeded(_, nodes):
                self._needed = frozenset(nodes)
            case TimerFired():
                pass
        return self._review(now_s)

    def _review(self, now_s: float) -> list[RentalCommand]:
        idle_s = max((terms.idle_s for terms in self._terms.values()), default=math.inf)
        self._limits = {
            job: limit for job, limit in self._limits.items() if now_s < limit.now_s + idle_s
        }
        out: list[RentalCommand] = []
        returned = [node for node in self._rented if not self._may_stay(node, now_s)]
        for node in returned:
            self._end(node, now_s + _RETURN_S)
        if returned:
            out.append(ReturnNodes(tuple(returned)))
        if taken := self._take(now_s):
            out.append(RentNodes(tuple(taken)))
        if (at_s := self._next_look_s(now_s, idle_s)) < math.inf:
            out.append(SetTimer(_TIMER, at_s))
        return out

    def _may_stay(self, node: NodeId, now_s: float) -> bool:
        provider = self._offered[node]
        wanted = node in self._needed or self._count_wanted() > 0
        return wanted and self._budget_lasts_s(provider, now_s) > _RETURN_S + _LOOK_S

    def _take(self, now_s: float) -> list[NodeId]:
        taken: list[NodeId] = []
        cheapest = sorted(self._offered, key=lambda node: self._terms_of(node).price_per_h)
        for node in cheapest:
            if node in self._rented:
                continue
            spare = [each for each in self._rented if each not in self._needed]
            have = sum(self._terms_of(each).instances_per_node for each in spare)
            useful = node in self._needed or have < self._count_wanted()
            if useful and self._affordable(node, now_s):
                self._rented[node] = now_s
                taken.append(node)
        return taken

    def _count_wanted(self) -> int:
        """Instances that must be rented."""
        others = max((limit.others for limit in self._limits.values()), default=0)
        return sum(limit.most for limit in self._limits.values()) - others

    def _affordable(self, node: NodeId, now_s: float) -> bool:
        provider, terms = self._offered[node], self._terms_of(node)
        left = terms.budget - self.cost_of(provider, now_s)
        return left >= terms.price_per_h * _LEAST_H * (len(self._nodes_of(provider)) + 1)

    def _budget_lasts_s(self, provider: str, now_s: float) -> float:
        """How long its budget lasts with the nodes that it has."""
        terms = self._terms[provider]
        rate = terms.price_per_h * len(self._nodes_of(provider)) / 3600
        return (terms.budget - self.cost_of(provider, now_s)) / rate if rate else math.inf

    def _next_look_s(self, now_s: float, idle_s: float) -> float:
        lasts_s = [self._budget_lasts_s(provider, now_s) for provider in self._terms]
        budgets = [each_s - _RETURN_S - _LOOK_S for each_s in lasts_s]
        limits = [limit.now_s + idle_s - now_s for limit in self._limits.values()]
        return now_s + max(min([*budgets, *limits], default=math.inf), _LOOK_S)

    def _terms_of(self, node: NodeId) -> RentalTerms:
        return self._terms[self._offered[node]]

    def _nodes_of(self, provider: str) -> list[tuple[NodeId, float]]:
        return [each for each in self._rented.items() if self._offered[each[0]] == provider]

    def _end(self, node: NodeId, now_s: float) -> None:
        if node in self._rented:
            since_s = self._rented.pop(node)
            provider = self._offered[node]
            self._spent[provider] += self._terms[provider].price_per_h * (now_s - since_s) / 3600

    def check_integrity(self) -> None:
        assert self._rented.keys() <= self._offered.keys(), "a node is rented that nobody offers"
