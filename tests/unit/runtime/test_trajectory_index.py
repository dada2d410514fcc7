"""A prompt that begins with a finished turn continues its trajectory."""

from hypothesis import given
from hypothesis import strategies as st

from slackwater.model.ids import TrajectoryId
from slackwater.runtime.executors.trajectory_index import (
    BLOCK_TOKENS,
    KEPT_S,
    TrajectoryIndex,
)

ONE, TWO = TrajectoryId("one"), TrajectoryId("two")
tokens = st.lists(st.integers(0, 5), min_size=BLOCK_TOKENS, max_size=80)


def record(
    index: TrajectoryIndex, prompt: list[int], sampled: list[int], name: TrajectoryId, now_s: float
) -> None:
    index.record_turn(index.find_continued("v", prompt)[1], sampled, name, now_s)


def find(index: TrajectoryIndex, version: str, prompt: list[int]) -> TrajectoryId | None:
    return index.find_continued(version, prompt)[0]


@given(tokens, st.lists(st.integers(0, 5), max_size=30))
def test_a_longer_prompt_continues_the_turn_it_begins_with(
    turn: list[int], more: list[int]
) -> None:
    index = TrajectoryIndex()
    record(index, turn[:3], turn[3:], ONE, 0.0)
    assert find(index, "v", turn + more) == ONE
    assert find(index, "w", turn + more) is None
    assert find(index, "v", [9, *turn, *more]) is None


def test_the_longest_beginning_wins() -> None:
    index, short = TrajectoryIndex(), [1] * BLOCK_TOKENS
    record(index, [1], short[1:], ONE, 0.0)
    record(index, [1], (short * 3)[1:], TWO, 0.0)
    assert find(index, "v", short * 4) == TWO
    assert find(index, "v", short * 2) == ONE


def test_too_short_to_tell_is_no_trajectory_and_the_oldest_are_forgotten() -> None:
    index = TrajectoryIndex(remembered=2)
    record(index, [1], [1] * (BLOCK_TOKENS - 2), ONE, 0.0)
    assert find(index, "v", [1] * 100) is None
    for number in range(3):
        record(index, [], [number] * BLOCK_TOKENS, TrajectoryId(str(number)), 0.0)
    found = [find(index, "v", [number] * BLOCK_TOKENS) for number in range(3)]
    assert found == [None, "1", "2"]


def test_prompts_that_share_a_beginning_are_not_taken_for_one_trajectory() -> None:
    index, shared = TrajectoryIndex(), [1] * (2 * BLOCK_TOKENS)
    record(index, shared, [5, 6], ONE, 0.0)
    assert find(index, "v", [*shared, 7, 8]) is None


def test_a_conversation_that_nobody_continued_for_long_is_forgotten() -> None:
    index, old, new = TrajectoryIndex(), [1] * BLOCK_TOKENS, [2] * BLOCK_TOKENS
    record(index, [], old, ONE, 0.0)
    record(index, [], new, TWO, KEPT_S)
    assert find(index, "v", old) == ONE
    record(index, [], [3] * BLOCK_TOKENS, TWO, KEPT_S + 1.0)
    assert find(index, "v", old) is None
    assert find(index, "v", new) == TWO


@given(st.lists(st.integers(0, 5), max_size=80), st.lists(st.integers(0, 5), max_size=80))
def test_a_turn_is_hashed_the_same_wherever_its_prompt_ends(
    prompt: list[int], sampled: list[int]
) -> None:
    whole, parts = TrajectoryIndex(), TrajectoryIndex()
    record(whole, [], prompt + sampled, ONE, 0.0)
    record(parts, prompt, sampled, ONE, 0.0)
    turn = prompt + sampled
    ends_in_sampled = len(turn) // BLOCK_TOKENS * BLOCK_TOKENS > len(prompt)
    assert find(parts, "v", turn) == (find(whole, "v", turn) if ends_in_sampled else None)
