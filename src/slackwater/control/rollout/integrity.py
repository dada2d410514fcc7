"""The rollout manager's invariants."""

from collections.abc import Iterable
from typing import TypeVar

from slackwater.control.rollout.dispatcher import Dispatcher
from slackwater.control.rollout.manager_state import ManagerState

T = TypeVar("T")


def _count(items: Iterable[T]) -> dict[T, int]:
    """Like Counter, which takes longer to make; this runs after every simulated event."""
    counts: dict[T, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


def check_state(state: ManagerState, dispatcher: Dispatcher) -> None:
    """Raise AssertionError if the parts of the state disagree."""
    counters = state.counters
    ended = counters.completed + counters.failed + counters.cancelled
    assert counters.submitted == len(state.turns) + ended, "a turn was lost or ended twice"
    dispatcher.queue.check_integrity()
    dispatcher.homes.check_integrity()
    timed = {name for _, _, name in state.deadlines}
    for name, turn in state.turns.items():
        assert (turn.attempt is not None) != (name in dispatcher.queue), f"{name} runs xor waits"
        assert len(turn.tokens) == len(turn.logprobs) <= turn.limit, f"{name} over its budget"
        assert turn.topk is None or len(turn.topk) == len(turn.tokens)
        assert name in timed, f"{name} has no deadline"
    asked = _count([turn.spec.version for turn in state.turns.values()])
    assert dispatcher.demand.counts() == asked, "the demand for versions is counted wrong"
    _check_attempts(state, dispatcher)


def _check_attempts(state: ManagerState, dispatcher: Dispatcher) -> None:
    held = 0
    for record in state.instances:
        held += len(record.attempts)
        assert record.load.in_flight == len(record.attempts)
        contexts = sum([turn.sent_context for turn in record.attempts.values()])
        assert sum(record.owned_tokens.values()) == contexts
        owners = {owner: turns for owner, turns in record.owners.items() if turns > 0}
        assert owners == _count([turn.spec.owner for turn in record.attempts.values()])
        assert 0 <= record.load.waiting <= record.load.in_flight
        assert not record.recalled & record.versions
        assert not record.recalled or record.spec.instance in state.instances.recalling
        assert record.load.accepting <= (bool(record.versions) and not record.draining)
        for attempt, turn in record.attempts.items():
            assert dispatcher.attempts[attempt] is turn
            assert turn.attempt == attempt < dispatcher.next_attempt
            assert turn.instance == record.spec.instance
            there = turn.version in record.versions or turn.version in record.recalled
            assert there, "runs on weights that are not there"
            assert turn.version in (turn.spec.version, *turn.spec.also_versions)
            assert state.turns[turn.spec.turn] is turn
    assert held == len(dispatcher.attempts)
