"""Simulated fleets whose invariants are checked after every event."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from slackwater.control.fleet.controller import FleetController, Handler
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.control.rollout.events import TokensArrived
from slackwater.control.timer import TimerFired
from slackwater.sim.fleet.fleet import SimulatedFleet
from slackwater.sim.slacks.fleet import FiveSlackFleet

_FULL_EVERY = 100  # events


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


class CheckedFleet(SimulatedFleet):
    """Checks the components that an event can have changed and, once all that follows from one
    thing has happened, what is between the controller and what really runs.
    """

    controller: CheckedController
    controller_type = CheckedController

    def _handled(self) -> None:
        self.controller.check_changed()
        if self.driver.idle:
            self.check_integrity()


class CheckedSlackFleet(CheckedFleet, FiveSlackFleet):
    """The same of a fleet with five kinds of slack."""
