"""Simulated engines under a fleet controller of their own, which benchmarks observe and disturb."""

from collections.abc import Callable

from slackwater.control.driver import Driver
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand
from slackwater.control.rollout.commands import AbortTurn, DispatchTurn, ReleaseInstance
from slackwater.control.rollout.events import BudgetChanged
from slackwater.control.steps.commands import RestEngine
from slackwater.control.timer import TimerFired
from slackwater.control.weights.commands import PullVersion
from slackwater.model.ids import InstanceId, TurnId
from slackwater.sim.core.queue import EventQueue
from slackwater.sim.rollout.simulated_instances import InstanceSettings, SimulatedInstances


class DrivenEngines(SimulatedInstances):
    """`on_command` hears of what engines do not execute."""

    def __init__(
        self,
        controller: FleetController,
        queue: EventQueue[Callable[[], None]],
        tokens_of: Callable[[TurnId], int],
        settings: InstanceSettings | None = None,
    ) -> None:
        self.controller = controller
        self.manager = controller.rollout
        self.on_command: Callable[[FleetCommand], None] = lambda _: None
        driver = Driver(
            controller,
            self.execute,
            clock=lambda: queue.now_s,
            schedule=self.schedule,
            deliver=self._timer_due,
        )
        super().__init__(queue, tokens_of, driver.feed, settings)

    def _timer_due(self, event: TimerFired) -> None:
        self.stream_all()
        self.tell(event)

    def execute(self, command: FleetCommand) -> None:
        match command:
            case DispatchTurn() | AbortTurn() | ReleaseInstance() | PullVersion():
                super().execute(command)
            case RestEngine(instance):
                self.places.pop(instance, None)
            case _:
                self.on_command(command)

    def run_until(self, end_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let things happen until `end_s`, or until `stop()`."""
        while len(self.queue) and not stop():
            happen = self.queue.pop()
            if self.now_s > end_s:
                return
            happen()

    def cut(self, instance: InstanceId, share: float) -> None:
        """A serving node lends less from now on; what no longer fits moves away first."""
        place = self.places.get(instance)
        if place is None:
            return
        self._advance(place)
        self._stream(place)
        engine = place.engine
        max_running, kv_tokens = int(engine.max_running * share), int(engine.kv_tokens * share)
        self.tell(BudgetChanged(self.now_s, instance, max_running, kv_tokens))
        engine.resize(max_running, kv_tokens)
        self._arm(place)
