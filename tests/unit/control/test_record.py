"""A record of events, replayed through a fresh controller, gives the same commands."""

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import pytest

from slackwater import control
from slackwater.control.message import Message
from slackwater.control.record import _FORMER_NAMES, record_line, replay
from slackwater.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Added:
    now_s: float
    amounts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Total:
    value: int
    parts: tuple[int, ...]


class Adder:
    """Sums what it is given; `offset` stands for a change of behaviour between two releases."""

    def __init__(self, offset: int = 0) -> None:
        self._sum = offset

    def handle(self, event: Added) -> Sequence[Total]:
        self._sum += sum(event.amounts)
        return (Total(self._sum, event.amounts),)

    def check_integrity(self) -> None:
        assert self._sum >= 0


def recorded(events: Sequence[Added]) -> list[bytes]:
    controller = Adder()
    return [record_line(event, controller.handle(event)) for event in events]


EVENTS = [Added(0.0, (1, 2)), Added(1.5, ()), Added(2.0, (3,))]


def test_a_replay_of_the_same_controller_agrees_to_the_end() -> None:
    assert replay(Adder(), recorded(EVENTS), {"Added": Added}) == (3, None)


def test_a_controller_that_decides_otherwise_is_found_at_its_first_other_command() -> None:
    agreed, divergence = replay(Adder(offset=1), recorded(EVENTS), {"Added": Added})
    assert agreed == 0
    assert divergence is not None
    assert divergence.line == 1
    assert divergence.recorded[0]["body"]["value"] == 3
    assert divergence.replayed[0]["body"]["value"] == 4


def test_an_event_of_another_controller_is_refused_by_its_line() -> None:
    with pytest.raises(ConfigError, match="record line 1: 'Added' is not an event"):
        replay(Adder(), recorded(EVENTS), {})


@dataclass(frozen=True, slots=True)
class DrainRequested:
    now_s: float


@dataclass(frozen=True, slots=True)
class AbortTurn:
    turn: str
    reason: str


class Aborter:
    def __init__(self, turn: str, reason: str) -> None:
        self._answer = AbortTurn(turn, reason)

    def handle(self, event: DrainRequested) -> Sequence[AbortTurn]:
        return (self._answer,)

    def check_integrity(self) -> None:
        assert self._answer


# As version 0.2 before its messages were renamed wrote it.
OLD_LINE = (
    b'{"event":{"type":"DrainAsked","body":{"now_s":1.0}},'
    b'"commands":[{"type":"AbortOn","body":{"turn":"a","reason":"somebody wants it to leave"}}]}'
)


@pytest.mark.parametrize(
    ("turn", "reason", "agrees"),
    [("a", "an operator drains it", True), ("b", "an operator drains it", False), ("a", "", False)],
)
def test_a_record_with_former_names_and_other_words_agrees_where_the_decision_is_the_same(
    turn: str, reason: str, agrees: bool
) -> None:
    controller = Aborter(turn, reason)
    agreed, divergence = replay(controller, [OLD_LINE], {"DrainRequested": DrainRequested})
    assert (agreed, divergence is None) == (int(agrees), agrees)


def test_former_names_mean_messages_that_exist_and_are_the_names_of_no_others() -> None:
    for module in pkgutil.walk_packages(control.__path__, "slackwater.control."):
        import_module(module.name)
    kinds, names = [Message], set()
    while kinds:
        kind = kinds.pop()
        names.add(kind.__name__)
        kinds += kind.__subclasses__()
    assert set(_FORMER_NAMES.values()) <= names
    assert not _FORMER_NAMES.keys() & names
