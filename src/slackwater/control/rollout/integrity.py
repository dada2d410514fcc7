"""The rollout manager's invariants."""

from collections.abc import Iterable
from typing import TypeVar

from slackwater.control.rollout.manager_state import ManagerState

T = TypeVar("T")


def _count(items: Iterable[T]) -> dict[T, int]:
    """A Counter takes longer to make than to fill, and this runs after every simulated event."""
    counts: dict[T, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


def check_books(books: ManagerState) -> None:
    """Raise AssertionError if the books disagree with each other."""
    counters, dispatcher = books.counters, books.dispatcher
    ended = counters.completed + counters.failed + counters.cancelled
    assert counters.submitted == len(books.turns) + ended, "a turn was lost or ended twice"
    dispatcher.line.check_integrity()
    dispatcher.homes.check_integrity()
    timed = {name for _, _, name in books.deadlines}
    for name, turn in books.turns.items():
        assert (turn.attempt is not None) != (name in dispatcher.line), f"{name} runs xor waits"
        assert len(turn.tokens) == len(turn.logprobs) <= turn.limit, f"{name} over its budget"
        assert turn.topk is None or len(turn.topk) == len(turn.tokens)
        assert name in timed, f"{name} could wait for ever"
    asked = _count([turn.spec.version for turn in books.turns.values()])
    assert books.demand.counts() == asked, "the demand for versions is counted wrong"
    _check_attempts(books)


def _check_attempts(books: ManagerState) -> None:
    dispatcher = books.dispatcher
    held = 0
    for record in books.instances:
        held += len(record.attempts)
        assert record.load.in_flight == len(record.attempts)
        contexts = sum([turn.sent_context for turn in record.attempts.values()])
        assert sum(record.owned_tokens.values()) == contexts
        owners = {owner: turns for owner, turns in record.owners.items() if turns > 0}
        assert owners == _count([turn.spec.owner for turn in record.attempts.values()])
        assert 0 <= record.load.waiting <= record.load.in_flight
        assert not record.recalled & record.versions
        assert not record.recalled or record.spec.instance in books.instances.recalling
        assert record.load.accepting <= (bool(record.versions) and not record.draining)
        for attempt, turn in record.attempts.items():
            assert dispatcher.attempts[attempt] is turn
            assert turn.attempt == attempt < dispatcher.next_attempt
            assert turn.instance == record.spec.instance
            there = turn.version in record.versions or turn.version in record.recalled
            assert there, "runs on weights that are not there"
            assert turn.version in (turn.spec.version, *turn.spec.also_versions)
            assert books.turns[turn.spec.turn] is turn
    assert held == len(dispatcher.attempts)
