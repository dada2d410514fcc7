"""A prompt that begins with a finished turn continues its trajectory."""

from hypothesis import given
from hypothesis import strategies as st

from slackwater.model.ids import TrajectoryId
from slackwater.runtime.executors.trajectory_index import (
    BLOCK_TOKENS,
    KEPT_S,
    TrajectoryIndex,
)

tokens = st.lists(st.integers(0, 5), min_size=BLOCK_TOKENS, max_size=80)
ONE, TWO = TrajectoryId("one"), TrajectoryId("two")


@given(tokens, st.lists(st.integers(0, 5), max_size=30))
def test_a_longer_prompt_continues_the_turn_it_begins_with(
    turn: list[int], more: list[int]
) -> None:
    index = TrajectoryIndex()
    index.record_turn("v", turn[:3], turn[3:], ONE, 0.0)
    assert index.find_continued("v", turn + more) == ONE
    assert index.find_continued("w", turn + more) is None
    assert index.find_continued("v", [9, *turn, *more]) is None


def test_the_longest_beginning_wins() -> None:
    index, short = TrajectoryIndex(), [1] * BLOCK_TOKENS
    index.record_turn("v", [1], short[1:], ONE, 0.0)
    index.record_turn("v", [1], (short * 3)[1:], TWO, 0.0)
    assert index.find_continued("v", short * 4) == TWO
    assert index.find_continued("v", short * 2) == ONE


def test_too_short_to_tell_is_no_trajectory_and_the_oldest_are_forgotten() -> None:
    index = TrajectoryIndex(remembered=2)
    index.record_turn("v", [1], [1] * (BLOCK_TOKENS - 2), ONE, 0.0)
    assert index.find_continued("v", [1] * 100) is None
    for number in range(3):
        index.record_turn("v", [], [number] * BLOCK_TOKENS, TrajectoryId(str(number)), 0.0)
    found = [index.find_continued("v", [number] * BLOCK_TOKENS) for number in range(3)]
    assert found == [None, "1", "2"]


def test_prompts_that_share_a_beginning_are_not_taken_for_one_trajectory() -> None:
    index, shared = TrajectoryIndex(), [1] * (2 * BLOCK_TOKENS)
    index.record_turn("v", shared, [5, 6], ONE, 0.0)
    assert index.find_continued("v", [*shared, 7, 8]) is None


def test_a_conversation_that_nobody_continued_for_long_is_forgotten() -> None:
    index, old, new = TrajectoryIndex(), [1] * BLOCK_TOKENS, [2] * BLOCK_TOKENS
    index.record_turn("v", [], old, ONE, 0.0)
    index.record_turn("v", [], new, TWO, KEPT_S)
    assert index.find_continued("v", old) == ONE
    index.record_turn("v", [], [3] * BLOCK_TOKENS, TWO, KEPT_S + 1.0)
    assert index.find_continued("v", old) is None
    assert index.find_continued("v", new) == TWO
