"""Which tails of a rollout fit the instances that stay, and when local engines give way."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slackwater.policy.rollout.forecast import RemainingTurns
from slackwater.policy.rollout.seeding import SeedingView
from slackwater.policy.rollout.tail import Room, Tail, TailTrajectory, assign_tail
from slackwater.policy.rollout.tail_split import TailSplit
from slackwater.policy.rollout.working_set import ContextGrowth, Tokens, most_expected

LONGEST = 1024


def learned(endings: list[tuple[int, int]]) -> ContextGrowth:
    """The law of a job whose trajectories ended so: after the prompt, with so much more."""
    growth = ContextGrowth(LONGEST)
    for prompt, more in endings:
        growth.grew(prompt, prompt + more)
        growth.ended(prompt + more)
    return growth


CONTEXTS = st.integers(1, LONGEST - 1)
LAWS = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), max_size=20).map(learned)
ROOMS = st.lists(
    st.tuples(st.lists(CONTEXTS, max_size=4), st.integers(1, 8 * LONGEST), st.integers(0, 4)),
    max_size=4,
)
MOVING = st.lists(st.tuples(CONTEXTS, st.booleans()), max_size=8)


@st.composite
def tails(draw: st.DrawFn) -> Tail:
    growth = draw(LAWS)
    rooms = [
        Room(total([growth.expected(context) for context in contexts]), kv_tokens, slots)
        for contexts, kv_tokens, slots in draw(ROOMS)
    ]
    moving = [TailTrajectory(growth.expected(context), runs) for context, runs in draw(MOVING)]
    return Tail(draw(st.integers(0, 1)), moving, rooms)


def total(sets: list[Tokens]) -> Tokens:
    return sum(sets, np.zeros((2, 32), dtype=np.int64))


@given(tails())
def test_every_trajectory_gets_a_room_that_holds_all_of_its_own_as_they_grow(tail: Tail) -> None:
    places = assign_tail(tail)
    if places is None:
        return
    assert len(places) == len(tail.moving)
    for number, room in enumerate(tail.rooms):
        mine = [each for each, at in zip(tail.moving, places, strict=True) if at == number]
        if mine:
            held = total([room.expected_tokens, *(each.expected_tokens for each in mine)])
            assert most_expected(held) <= room.kv_tokens
            assert sum(each.runs for each in mine) <= room.slots


@given(tails())
def test_a_tail_fits_once_there_is_a_room_for_all_of_it(tail: Tail) -> None:
    whole = sum(int(most_expected(each.expected_tokens)) + 1 for each in tail.moving)
    spare = Room(total([]), whole, len(tail.moving))
    assert assign_tail(Tail(tail.starts, tail.moving, [*tail.rooms, spare])) is not None


@given(tails())
def test_a_trajectory_that_outgrows_every_room_keeps_local_engines_at_work(tail: Tail) -> None:
    huge = TailTrajectory(total([]) + 100 * LONGEST, runs=False)
    assert assign_tail(Tail(0, [*tail.moving, huge], tail.rooms)) is None


def view(tail: Tail, **changed: Any) -> SeedingView:
    fields: dict[str, Any] = {
        "elapsed_s": 1e6,
        "window_s": 0.0,
        "remote_ready": len(tail.rooms),
        "remote_joined": len(tail.rooms),
        "local_engines": 1,
        "turns": 100,
        "turns_left": 10,
        "ready_tokens": 0.0,
        "remaining": RemainingTurns(np.zeros(0), np.zeros(0)),
        "forecast": None,
        "trainer_waits": True,
        "tail": lambda: tail,
    }
    return SeedingView(**(fields | changed))


@given(tails())
def test_local_engines_give_way_exactly_when_they_would_not_be_called_back(tail: Tail) -> None:
    policy = TailSplit()
    state, now = policy.start(), view(tail)
    assert (policy.ends(state, now) is None) == (policy.resumes(state, now) is not None)
    assert tail.starts == 0 or policy.ends(state, now) is None


@given(tails())
def test_nothing_is_split_before_the_trainer_waits_and_all_ends_with_the_last_turn(
    tail: Tail,
) -> None:
    policy = TailSplit()
    assert policy.ends(policy.start(), view(tail, trainer_waits=False)) is None
    done = view(tail, turns_left=0)
    assert policy.ends(policy.start(), done) is not None
    assert policy.resumes(policy.start(), done) is None
