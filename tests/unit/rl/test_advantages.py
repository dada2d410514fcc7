"""From rewards to what each sampled token is pushed by."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.model.errors import ConfigError
from slackwater.rl.advantages import (
    farthest_apart,
    group_advantages,
    is_informative,
    token_advantages,
)
from slackwater.rl.recipe import GrpoSettings

REWARDS = st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=2, max_size=16)


@given(REWARDS)
def test_a_groups_advantages_sum_to_nothing_and_keep_the_rewards_order(
    rewards: list[float],
) -> None:
    advantages = group_advantages(rewards, by_spread=True)
    assert abs(float(advantages.sum())) < 1e-3
    for one, other in zip(
        np.argsort(rewards, kind="stable"), np.argsort(rewards, kind="stable")[1:], strict=False
    ):
        assert advantages[one] <= advantages[other] + 1e-6
    if is_informative(rewards):
        assert float(advantages.std()) == pytest.approx(1.0, abs=1e-3)


def test_without_the_spread_an_advantage_is_the_distance_from_the_mean() -> None:
    np.testing.assert_allclose(group_advantages([0, 1, 1, 2], by_spread=False), [-1, 0, 0, 1])


@pytest.mark.parametrize(
    ("rewards", "expected"), [([1, 1, 1], False), ([0, 0], False), ([0, 0, 0.1], True)]
)
def test_a_group_teaches_only_if_its_rewards_differ(rewards: list[float], expected: bool) -> None:
    assert is_informative(rewards) is expected


def test_pushes_are_shares_of_a_mean_over_the_updates_tokens() -> None:
    logprobs = [np.full(3, -1, np.float32), np.full(1, -1, np.float32)]
    pushes = token_advantages([2.0, -4.0], logprobs, entropy_bonus=0.0)
    np.testing.assert_allclose(pushes[0], [0.5, 0.5, 0.5])
    np.testing.assert_allclose(pushes[1], [-1.0])


def test_the_entropy_bonus_favours_what_was_surprising_and_adds_up_to_nothing() -> None:
    logprobs = [np.array([-0.1, -3.0], np.float32)]
    (pushed,) = token_advantages([0.0], logprobs, entropy_bonus=0.5)
    assert pushed[1] > 0 > pushed[0]
    assert float(pushed.sum()) == pytest.approx(0, abs=1e-6)


def test_pieces_of_an_update_push_as_the_whole_does_when_they_know_its_tokens() -> None:
    logprobs = [np.full(n, -1.0, np.float32) for n in (3, 5, 2)]
    whole = token_advantages([1.0, -2.0, 0.5], logprobs, 0.0)
    pieces = [
        *token_advantages([1.0], logprobs[:1], 0.0, tokens=10),
        *token_advantages([-2.0, 0.5], logprobs[1:], 0.0, tokens=10),
    ]
    for one, other in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(one, other)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9), st.integers(2, 9))
def test_the_rewards_that_lie_farthest_apart_have_the_largest_variance_of_all_choices(
    rewards: list[float], count: int
) -> None:
    count = min(count, len(rewards))
    found = farthest_apart(rewards, count)
    assert len(set(found)) == count and found == sorted(found)
    choices = combinations(range(len(rewards)), count)
    best = max(float(np.var([rewards[place] for place in places])) for places in choices)
    assert np.var([rewards[place] for place in found]) == pytest.approx(best)


def test_a_recipe_that_would_train_on_more_answers_than_it_samples_is_refused() -> None:
    for wrong in (1, 13):
        with pytest.raises(ConfigError, match=f"grpo.train_on: {wrong} must be 0 .all., or from 2"):
            GrpoSettings(group_size=12, train_on=wrong)
