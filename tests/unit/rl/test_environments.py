"""Verifiable tasks: the same prompt is the same task, any text is an answer, rewards are what they
say.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.model.errors import ConfigError
from slackwater.rl.environments.arithmetic import Arithmetic, CopyDigits, CountingTask
from slackwater.rl.environments.frozen_lake import FrozenLake
from slackwater.rl.environments.guess_number import GuessNumber

AnswersAtOnce = Arithmetic | CopyDigits | CountingTask | FrozenLake | GuessNumber
ALL: list[AnswersAtOnce] = [
    Arithmetic(max_operand=99),
    CopyDigits(),
    CountingTask(),
    FrozenLake(),
    GuessNumber(),
]


@pytest.mark.parametrize("environment", ALL, ids=lambda e: e.kind)
@given(prompt=st.integers(0, 300), answers=st.lists(st.text(max_size=4), min_size=20, max_size=20))
@settings(max_examples=25, deadline=None)
def test_any_answers_end_an_episode_with_a_bounded_reward_and_replays_agree(
    environment: AnswersAtOnce, prompt: int, answers: list[str]
) -> None:
    told = []
    for _ in range(2):
        episode, total, seen = environment.episode(prompt), 0.0, []
        seen.append(episode.first_observation)
        for text in [*answers[:2], *(["1", "R", "5", "D"] * 5)]:
            reply = episode.answer(text)
            total += reply.reward
            seen.append(reply.observation)
            if reply.done:
                break
        assert reply.done
        assert 0 <= total <= 1.5
        told.append((seen, total))
    assert told[0] == told[1]


@pytest.mark.parametrize("environment", ALL, ids=lambda e: e.kind)
def test_a_demonstration_is_an_episode_to_its_end(environment: AnswersAtOnce) -> None:
    for prompt in range(5):
        turns, episode = environment.demonstration(prompt), environment.episode(prompt)
        assert turns[0][0] == episode.first_observation
        replies = [episode.answer(answer) for _, answer in turns]
        assert [reply.done for reply in replies] == [False] * (len(turns) - 1) + [True]
        assert [r.observation for r in replies[:-1]] == [seen for seen, _ in turns[1:]]


def test_sums_pay_in_full_for_the_sum_and_half_at_most_for_digits() -> None:
    task = Arithmetic(max_operand=99, seed=1).episode(3)
    first, second = task.first_observation.rstrip("=").split("+")
    right = str(int(first) + int(second))
    assert task.answer(f" {right}\n").reward == 1.0
    assert 0 < task.answer(right + "0").reward < 0.5
    assert task.answer("").reward == 0.0
    assert Arithmetic(partial=False).episode(0).answer("19").reward == 0.0


def test_copying_pays_by_places_and_counts_what_is_too_long() -> None:
    task = CopyDigits(digits=4).episode(1)
    expected = task.first_observation[:-1]
    assert task.answer(expected).reward == 1.0
    assert task.answer(expected[:2]).reward == 0.5
    assert task.answer(expected + "xxxx").reward == 0.5


@pytest.mark.parametrize("step", [1, -1, 3])
def test_counting_pays_each_place_that_goes_on_from_the_one_before(step: int) -> None:
    task = CountingTask(digits=12, step=step).episode(1)
    first = int(task.first_observation[:-1])
    expected = "".join(str((first + step * place) % 10) for place in range(1, 13))
    assert task.answer(expected).reward == 1.0
    assert task.answer(expected[:6]).reward == 0.5
    assert task.answer(expected + "x" * 12).reward == 0.5
    assert task.answer(expected[:6] + expected[:6]).reward == pytest.approx(11 / 12)  # one slip
    assert task.answer("=" * 12).reward == 0.0


def test_bisection_finds_the_number_and_earlier_pays_more() -> None:
    rules = GuessNumber(highest=8, max_turns=4)
    for prompt in range(20):
        low, high, total = 1, 8, 0.0
        episode = rules.episode(prompt)
        for turn in range(4):
            guess = (low + high) // 2
            reply = episode.answer(str(guess))
            total += reply.reward
            if reply.done:
                assert total == pytest.approx(0.1 + 1 - turn / 4)
                break
            low, high = (guess + 1, high) if reply.observation == "higher?" else (low, guess - 1)
        else:
            pytest.fail("not found in four turns")


def test_a_guess_that_is_no_number_in_range_ends_the_game_unpaid() -> None:
    for text in ("", "x", "0", "9", "²", "-1"):
        reply = GuessNumber(highest=8).episode(0).answer(text)
        assert (reply.reward, reply.done) == (0.0, True)


def shortest_way(lake: str, size: int) -> str:
    """Moves to the goal by breadth first search over the shown map."""
    cells = lake.rstrip(">").replace("/", "")
    steps = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
    start = cells.index("*")
    queue, seen = [(start, "")], {start}
    for place, moves in queue:
        if cells[place] == "G":
            return moves
        for move, (down, right) in steps.items():
            row, column = place // size + down, place % size + right
            there = row * size + column
            inside = 0 <= row < size and 0 <= column < size
            if inside and there not in seen and cells[there] != "H":
                seen.add(there)
                queue.append((there, moves + move))
    raise AssertionError(f"no way across {lake}")


def test_the_lake_is_crossed_by_the_way_that_its_map_shows() -> None:
    for prompt in range(10):
        episode = FrozenLake(step_reward=0.0).episode(prompt)
        replies = [episode.answer(m) for m in shortest_way(episode.first_observation, 4)]
        assert replies[-1].done
        assert sum(reply.reward for reply in replies) == 1.0


def test_only_a_move_that_comes_nearer_than_any_before_earns_a_step() -> None:
    episode = FrozenLake(step_reward=0.05).episode(3)
    way = shortest_way(episode.first_observation, 4)
    back = {"L": "R", "R": "L", "U": "D", "D": "U"}[way[0]]
    rewards = [episode.answer(move).reward for move in (way[0], back, *way)]
    assert rewards[:3] == [0.05, 0.0, 0.0]
    assert rewards[3:-1] == [0.05] * (len(way) - 2)
    assert rewards[-1] == 1.05


def test_bad_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"environment.highest: 1 must be at least 2"):
        GuessNumber(highest=1)
    with pytest.raises(ConfigError, match=r"environment.prompts: 0 must be at least 1"):
        CopyDigits(prompts=0)
