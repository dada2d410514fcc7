"""Simulated fleets whose invariants are checked after every event."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from harness.broker_checks import check_broker
from harness.serving_checks import check_serving
from harness.simulated_devices import DeploymentCommand, SimulatedDevices
from slackwater.control.fleet.controller import FleetController, Handler
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.control.lending import commands as do
from slackwater.control.lending import events as on
from slackwater.control.lending.lender import LendingController
from slackwater.control.rollout import events as of_rollout
from slackwater.control.rollout.events import TokensArrived
from slackwater.control.timer import TimerFired
from slackwater.model.ids import InstanceId, JobId, NodeId, ServiceName
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.sim.fleet import context
from slackwater.sim.fleet.engines import SimulatedEngines
from slackwater.sim.fleet.fleet import SimulatedFleet
from slackwater.sim.fleet.job import BASE_MODEL
from slackwater.sim.fleet.serving import ServingCommand
from slackwater.sim.slacks.fleet import FiveSlackFleet

_FULL_EVERY = 100  # events
_SERVICE = ServiceName("chat")
_REPORT_S = 30.0


class CheckedController(FleetController):
    """Knows which components handled a message since the last check: no other can have changed."""

    def _table(self) -> dict[type, tuple[Handler, ...]]:
        self._changed: set[int] = set()
        self._checks = 0
        table = super()._table()
        self._timers = {name: self._watched(handler) for name, handler in self._timers.items()}
        return {kind: tuple(map(self._watched, handlers)) for kind, handlers in table.items()}

    def _watched(self, handler: Handler) -> Handler:
        component = id(getattr(handler, "__self__", None))
        changed = self._changed

        def handle(message: Any) -> Sequence[Any]:
            changed.add(component)
            return handler(message)

        return handle

    def handle(self, event: FleetEvent) -> Sequence[FleetCommand]:
        if type(event) is TokensArrived:
            self._changed.add(id(self.rollout))
        return super().handle(event)

    def _timer_fired(self, event: TimerFired) -> Sequence[Any]:
        if not event.name.startswith(tuple(self._timers)):
            self._changed.add(id(self.rollout))
        return super()._timer_fired(event)

    def _route(
        self, messages: Sequence[Any], now_s: float, inbox: deque[Any], out: list[FleetCommand]
    ) -> None:
        if self._heard_at_once and any(type(one) in self._heard_at_once for one in messages):
            self._changed.add(id(self.phases))
        super()._route(messages, now_s, inbox, out)

    def check_changed(self) -> None:
        """Raise AssertionError if an invariant does not hold that the last event can have broken;
        now and then, if any does not.
        """
        self._checks += 1
        if self._checks % _FULL_EVERY == 0:
            self.check_integrity()
        else:
            for component in self.components():
                if id(component) in self._changed:
                    component.check_integrity()
            self.check_agreement()
        self._changed.clear()


class InvariantChecks(SimulatedFleet):
    """Checks the components that an event can have changed and, once all that follows from one
    thing has happened, what is between the controller and what really runs.
    """

    controller: CheckedController
    controller_type = CheckedController

    def _open(self) -> None:
        self.devices = SimulatedDevices(self)
        super()._open()

    def _execute(self, command: FleetCommand) -> None:
        if isinstance(command, DeploymentCommand):
            self.devices.execute(command)
        else:
            super()._execute(command)

    def record_start(self, place: NodeId, role: str) -> None:
        self.devices.start(place, role)

    def lose_node(self, node: NodeId) -> None:
        self.devices.lose_node(node)
        super().lose_node(node)

    def _check_event(self) -> None:
        self.controller.check_changed()
        if self.driver.idle:
            self.check_integrity()


class CheckedSlackFleet(InvariantChecks, FiveSlackFleet):
    """A fleet with five kinds of slack."""

    def check_integrity(self) -> None:
        super().check_integrity()
        check_broker(self.cores.broker)
        if self.serving is not None:
            check_serving(self.serving)
        used, cores = self.cores.used, self.scenario.external.cores
        assert used <= cores, f"{used} actions on {cores} cores"


class CheckedFleet(InvariantChecks):
    """A fleet with nodes of services, some of which may be cut off."""

    serving: "LentNodes"

    def __init__(self, *args: Any, serving_nodes: int = 0, **named: Any) -> None:
        self._serving_nodes = serving_nodes
        lending = LendingController([BASE_MODEL]) if serving_nodes else None
        super().__init__(*args, lending=lending, **named)

    def _open(self) -> None:
        super()._open()
        self.engines = LentEngines(self)
        if self._serving_nodes:
            self.serving = LentNodes(self, self._serving_nodes)

    def check_integrity(self) -> None:
        super().check_integrity()
        if self._serving_nodes:
            self.serving.check_integrity()

    def cut_off(self, node: NodeId, seconds: float) -> None:
        """Nothing is heard of a node, and nothing reaches it; beyond its lease its trainer is
        lost.
        """
        self.silent_until_s[node] = max(self.now_s + seconds, self.silent_until_s.get(node, 0.0))
        if seconds > context.SETTINGS.lease_s:
            self.after(context.SETTINGS.lease_s, partial(self._given_up, node))

    def _given_up(self, node: NodeId) -> None:
        if self.silent_s(node):
            self.trainers.lose_node(node, "nothing was heard of it")


class LentEngines(SimulatedEngines):
    """A borrowed engine that ends has its loan end."""

    def __init__(self, fleet: CheckedFleet) -> None:
        super().__init__(fleet, fleet.clients)
        self._lender = fleet

    def end(self, instance: InstanceId) -> None:
        ends = instance in self.living
        super().end(instance)
        if ends and self.node_of[instance] not in self._lender.places:
            self._lender.serving.leave(self.node_of[instance], instance)


class LentNodes:
    """`lent` are the instances that rollouts have on serving nodes."""

    def __init__(self, fleet: CheckedFleet, nodes: int) -> None:
        self._fleet = fleet
        self._nodes = [NodeId(f"serve-{number}") for number in range(nodes)]
        self.lent: dict[NodeId, InstanceId] = {}
        self._job_of: dict[NodeId, JobId] = {}
        self._leaving: set[NodeId] = set()
        self.loans = 0

    def start(self) -> None:
        fleet = self._fleet
        for node in self._nodes:
            fleet.tell(on.ServingNodeJoined(fleet.now_s, node, _SERVICE))
            self._report(node)

    def execute(self, command: ServingCommand) -> None:
        fleet = self._fleet
        match command:
            case do.LendNode(node, job):
                assert node not in self._job_of, f"{node} is lent twice"
                self._job_of[node] = job
                fleet.after(fleet.costs.start_s, partial(self._lend, node, job))
            case do.ReclaimNode(node):
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
        lent = lending.lender.loans()
        held = {node: job for node, job in self._job_of.items() if node not in self._leaving}
        assert lent == held, f"lent are {lent}, and in use {held}"
        assert self.lent.keys() <= self._job_of.keys(), f"{self.lent} runs what it was not lent for"
