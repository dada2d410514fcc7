"""The driver of one controller, live and simulated: inbox, named timers, record and executors.

An event that comes while another is handled waits in the inbox, so that a controller sees it only
after the commands of the one before. Clock and scheduler are given: an event loop or a simulation.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from slackwater.control.controller import Controller, TimedEvent
from slackwater.control.record import record_line
from slackwater.control.timer import SetTimer, TimerFired

E = TypeVar("E", bound=TimedEvent)
C = TypeVar("C")

Schedule = Callable[[float, Callable[[], None]], object]  # calls back at a time of the clock


class Driver(Generic[E, C]):
    """Feeds events to a controller, executes its commands and keeps its timers."""

    def __init__(
        self,
        controller: Controller[E, C],
        execute: Callable[[C], None],
        *,
        clock: Callable[[], float],
        schedule: Schedule,
        record: Callable[[bytes], None] | None = None,
        failed: Callable[[E], None] | None = None,
        around: Callable[[], AbstractContextManager[object]] | None = None,
        deliver: Callable[[TimerFired], None] | None = None,
        handled: Callable[[], None] | None = None,
    ) -> None:
        """`execute` takes commands without a registered executor; `record` one line per event.
        `failed` hears of an event at which the controller raised. `around` wraps the handling of an
        event, `handled` follows it. `deliver` takes due timers in place of `feed`.
        """
        self.controller = controller
        self.current: E | None = None
        self.events = 0
        self._execute = execute
        self._executors: dict[type, Callable[[Any], None]] = {}
        self._clock = clock
        self._schedule = schedule
        self._record = record
        self._failed = failed
        self._around = around
        self._deliver: Callable[[Any], None] = deliver or self.feed
        self._handled = handled
        self._inbox: deque[E] = deque()
        self._handling = False
        self._timers: dict[str, float] = {}

    def feed(self, *events: E) -> None:
        """Handle events, after those that are being handled."""
        inbox = self._inbox
        inbox.extend(events)
        if self._handling:
            return
        self._handling = True
        try:
            while inbox:
                event = inbox.popleft()
                if self._around is None:
                    self._handle(event)
                else:
                    with self._around():
                        self._handle(event)
        finally:
            self._handling = False

    def register(self, execute: Callable[[Any], None], kinds: Iterable[type]) -> None:
        """Let `execute` take commands of these types."""
        self._executors |= dict.fromkeys(kinds, execute)

    def execute(self, command: C) -> None:
        self._executors.get(type(command), self._execute)(command)

    @property
    def idle(self) -> bool:
        """Whether nothing waits in the inbox."""
        return not self._inbox

    def close(self) -> None:
        """Drop all timers."""
        self._timers.clear()

    def _handle(self, event: E) -> None:
        self.current = event
        self.events += 1
        try:
            commands = self.controller.handle(event)
        except Exception:
            if self._failed is not None:
                self._failed(event)
            raise
        if self._record is not None:
            self._record(record_line(event, commands))
        executors, otherwise = self._executors, self._execute
        for command in commands:
            if isinstance(command, SetTimer):
                self._set(command.name, command.at_s)
            else:
                executors.get(type(command), otherwise)(command)
        if self._handled is not None:
            self._handled()

    def _set(self, name: str, at_s: float) -> None:
        """A timer of the same name that is not yet due is replaced."""
        self._timers[name] = at_s
        self._schedule(at_s, lambda: self._due(name, at_s))

    def _due(self, name: str, at_s: float) -> None:
        if self._timers.get(name) == at_s:
            del self._timers[name]
            self._deliver(TimerFired(self._clock(), name))
