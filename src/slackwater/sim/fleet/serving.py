"""Serving nodes of a simulated fleet: they report what they use, lend, and take back."""

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from slackwater.control.lending import commands as do
from slackwater.control.lending import events as on
from slackwater.control.rollout import events as of_rollout
from slackwater.model.ids import InstanceId, JobId, NodeId, ServiceName
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.sim.fleet.engines import BASE_MODEL

if TYPE_CHECKING:
    from slackwater.sim.fleet.fleet import SimulatedFleet

SERVICE = ServiceName("chat")
_REPORT_S = 30.0

ServingCommand: TypeAlias = do.LendNode | do.TakeBack | do.BeginStep


class SimulatedServing:
    """`lent` are the instances that rollouts have on serving nodes."""

    def __init__(self, fleet: "SimulatedFleet", nodes: int) -> None:
        self._fleet = fleet
        self._nodes = [NodeId(f"serve-{number}") for number in range(nodes)]
        self.lent: dict[NodeId, InstanceId] = {}
        self._job_of: dict[NodeId, JobId] = {}
        self._leaving: set[NodeId] = set()
        self.loans = 0

    def start(self) -> None:
        fleet = self._fleet
        for node in self._nodes:
            fleet.tell(on.ServingNodeJoined(fleet.now_s, node, SERVICE))
            self._report(node)

    def execute(self, command: ServingCommand) -> None:
        fleet = self._fleet
        match command:
            case do.LendNode(node, job):
                assert node not in self._job_of, f"{node} is lent twice"
                self._job_of[node] = job
                fleet.after(fleet.costs.start_s, partial(self._lend, node, job))
            case do.TakeBack(node):
                self._leaving.add(node)
                fleet.after(0.1, partial(self._clear, node))
            case do.BeginStep():
                pass  # its budget stays

    def _lend(self, node: NodeId, job: JobId) -> None:
        if self._job_of.get(node) != job or node in self.lent or node in self._leaving:
            return
        self.loans += 1
        name = self.lent[node] = InstanceId(f"{node}~{self.loans}")
        spec = InstanceSpec(
            *(name, InstanceKind.BORROWED, 8, 4096, 1 << 16), job=job, base_model=BASE_MODEL
        )
        self._fleet.engines.join(spec, node)

    def _clear(self, node: NodeId) -> None:
        fleet = self._fleet
        self._leaving.discard(node)
        self._job_of.pop(node, None)
        if (instance := self.lent.pop(node, None)) is not None:
            fleet.engines.end(instance)
            fleet.tell(of_rollout.InstanceLost(fleet.now_s, instance, "the node was taken back"))
        fleet.tell(on.NodeCleared(fleet.now_s, node))

    def leave(self, node: NodeId, instance: InstanceId) -> None:
        """A borrowed engine has ended by itself, unless its node is being taken back anyway."""
        if self.lent.get(node) == instance:
            del self.lent[node]
            if node not in self._leaving:
                del self._job_of[node]
                self._fleet.tell(on.LoanFailed(self._fleet.now_s, node, "its engine ended"))

    def _report(self, node: NodeId) -> None:
        fleet = self._fleet
        busy = fleet.chance(0.1)
        use = (0.9, 0.95) if busy else (0.1, 0.1)
        kept = not fleet.chance(0.02)
        fleet.tell(on.ServingNodeReported(fleet.now_s, node, *use, kept))
        needed = (busy or not kept) and node in self._job_of
        assert not needed or node in self._leaving, f"{node} is lent while its service needs it"
        fleet.after(_REPORT_S, partial(self._report, node))

    def check_integrity(self) -> None:
        """Whoever runs on a serving node was lent it."""
        lending = self._fleet.controller.lending
        assert lending is not None
        lent = lending.lender.lent()
        held = {node: job for node, job in self._job_of.items() if node not in self._leaving}
        assert lent == held, f"lent are {lent}, and in use {held}"
        assert self.lent.keys() <= self._job_of.keys(), f"{self.lent} runs what it was not lent for"
