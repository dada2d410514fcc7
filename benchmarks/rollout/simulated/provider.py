"""Replays a spot trace as a provider: instances can be had while the trace has them, and cost
while held.
"""

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.rollout.simulated.driven_engines import DrivenEngines
from slackwater.control.coschedule.commands import RentNodes, ReturnNodes
from slackwater.control.rental import (
    InstancesLimited,
    NodeOffered,
    NodeWithdrawn,
    RentalController,
    RentalEvent,
    RentalTerms,
)
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import InstanceId, JobId, NodeId
from slackwater.model.instance import InstanceKind
from slackwater.model.spot_trace import SpotEvent
from slackwater.sim.rollout.engine_cost import EngineCost


class SpotProvider:
    """Offers the available instances to the rental controller, which takes the oldest first."""

    def __init__(
        self,
        body: DrivenEngines,
        engine: EngineCost,
        *,
        max_running: int,
        terms: RentalTerms,
        start_s: float = 20.0,
        slowdown_of: Callable[[int], float] = lambda number: 1.0,
    ) -> None:
        """`slowdown_of` says of the n-th instance that is taken how many times as long its work
        takes.
        """
        self._body = body
        self._engine = engine
        self._max_running = max_running
        self._controller = RentalController({"": terms})
        self._start_s = start_s
        self._held: dict[InstanceId, float] = {}
        self._held_seconds = 0.0
        self._due_s = 0.0
        self._slowdown_of = slowdown_of
        self._numbers: dict[InstanceId, int] = {}

    def replay(self, events: Sequence[SpotEvent]) -> None:
        """Let the trace happen."""
        for row in events:
            self._body.schedule(row.t_s, partial(self._happen, row))

    def held_seconds(self, now_s: float) -> float:
        """Instance-seconds paid for so far."""
        return self._held_seconds + sum(now_s - since_s for since_s in self._held.values())

    def limit(self, job: JobId, most: int) -> None:
        """A job can use so many instances."""
        self._feed(InstancesLimited(self._body.now_s, job, most))

    def _happen(self, row: SpotEvent) -> None:
        node = NodeId(row.instance_id)
        if row.event == "add":
            self._feed(NodeOffered(row.t_s, node))
            return
        instance = InstanceId(node)
        if instance in self._held:
            self._drop(instance)
            self._body.lose(instance)
        self._feed(NodeWithdrawn(row.t_s, node))

    def _feed(self, event: RentalEvent) -> None:
        for command in self._controller.handle(event):
            match command:
                case RentNodes(nodes):
                    for node in nodes:
                        self._take(InstanceId(node))
                case ReturnNodes(nodes):
                    for node in nodes:
                        self._drop(InstanceId(node))
                        self._body.lose(InstanceId(node))
                case SetTimer(name, at_s):
                    self._due_s = at_s
                    self._body.schedule(at_s, partial(self._due, name, at_s))

    def _due(self, name: str, at_s: float) -> None:
        if at_s == self._due_s:  # else a later one has replaced it
            self._feed(TimerFired(at_s, name))

    def _take(self, instance: InstanceId) -> None:
        since_s = self._body.now_s
        self._held[instance] = since_s
        slowdown = self._slowdown_of(self._numbers.setdefault(instance, len(self._numbers)))

        def up() -> None:
            if self._held.get(instance) == since_s:
                kind, turns = InstanceKind.SPOT, self._max_running
                spec = self._body.spec(instance, kind, self._engine, max_running=turns)
                self._body.join(spec, self._engine, slowdown=slowdown)

        self._body.schedule(since_s + self._start_s, up)

    def _drop(self, instance: InstanceId) -> None:
        self._held_seconds += self._body.now_s - self._held.pop(instance)
