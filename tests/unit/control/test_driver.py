"""The driver: events one after the other, timers that replace each other, a record that replays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from slackwater.control.driver import Driver
from slackwater.control.record import replay
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.sim.core.queue import EventQueue


@dataclass(frozen=True, slots=True)
class Asked:
    now_s: float
    what: str


@dataclass(frozen=True, slots=True)
class Answer:
    what: str


class Echo:
    """Answers what it is asked; \"later NAME T\" sets a timer."""

    def handle(self, event: Asked | TimerFired) -> Sequence[Answer | SetTimer]:
        if isinstance(event, TimerFired):
            return (Answer(f"{event.name} at {event.now_s:g}"),)
        if event.what == "wrong":
            raise ValueError("wrong")
        match event.what.split():
            case ["later", name, at_s]:
                return (SetTimer(name, float(at_s)),)
            case words:
                return [Answer(word) for word in words]

    def check_integrity(self) -> None:
        """Nothing to check."""


class Stage:
    """Executes answers; \"again\" asks for more while commands are being executed."""

    def __init__(self) -> None:
        self.queue: EventQueue[Callable[[], None]] = EventQueue()
        self.said: list[str] = []
        self.lines: list[bytes] = []
        self.failed: list[str] = []
        self.driver: Driver[Asked | TimerFired, Answer | SetTimer] = Driver(
            Echo(),
            self._execute,
            clock=lambda: self.queue.now_s,
            schedule=self.queue.push_soon,
            record=self.lines.append,
            failed=lambda event: self.failed.append(type(event).__name__),
        )

    def _execute(self, command: Answer | SetTimer) -> None:
        assert isinstance(command, Answer), "timers are the driver's"
        self.said.append(command.what)
        if command.what == "again":
            self.ask("more")

    def ask(self, *what: str) -> None:
        self.driver.feed(*(Asked(self.queue.now_s, one) for one in what))

    def run(self) -> None:
        while len(self.queue):
            self.queue.pop()()


def test_timers_are_the_drivers_even_if_an_executor_takes_every_kind_of_command() -> None:
    stage = Stage()
    stage.driver.register(stage._execute, (Answer, SetTimer))
    stage.ask("later alarm 5")
    stage.run()
    assert stage.said == ["alarm at 5"]


def test_what_follows_from_a_command_waits_until_the_event_is_done() -> None:
    stage = Stage()
    stage.ask("again then", "last")
    assert stage.said == ["again", "then", "last", "more"]
    assert stage.driver.idle
    assert stage.driver.events == 3


def test_a_timer_that_is_set_again_fires_once_at_its_last_time() -> None:
    stage = Stage()
    stage.ask("later a 5", "later b 3", "later a 2", "later b 3")
    stage.run()
    assert stage.said == ["a at 2", "b at 3"]


def test_no_timer_fires_after_the_end() -> None:
    stage = Stage()
    stage.ask("later a 5")
    stage.driver.close()
    stage.run()
    assert stage.said == []


def test_the_record_replays() -> None:
    stage = Stage()
    stage.ask("again", "later a 5")
    stage.run()
    kinds: dict[str, type] = {"Asked": Asked, "TimerFired": TimerFired}
    assert replay(Echo(), stage.lines, kinds) == (4, None)


def test_a_controller_that_raises_is_told_of_and_the_next_event_is_taken() -> None:
    stage = Stage()
    with pytest.raises(ValueError, match="wrong"):
        stage.ask("wrong")
    assert stage.failed == ["Asked"]
    stage.ask("fine")
    assert stage.said == ["fine"]
