"""What a policy is pushed by: DPO's gradient, and the distance to a reference model."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.rl.grpo import policy_data
from slackwater.rl.recipe import load_recipe
from slackwater.rl.rollout import Trajectory, TrajectoryGroup, kl_estimate
from slackwater.rl.run_directory import PromptUse
from slackwater.rl.supervised import preference_weights


@given(
    st.lists(st.floats(-20, 20), min_size=1, max_size=5),
    st.floats(0.01, 2.0),
)
def test_the_weights_of_a_pair_are_the_gradient_of_dpo(margins: list[float], beta: float) -> None:
    """Cross-entropy is -sum(weight * log-prob), so a weight is minus the loss's derivative."""
    values = np.asarray(margins, np.float64)

    def loss(at: Any) -> float:
        return float(np.logaddexp(0.0, -beta * at).mean())

    weights = preference_weights(values.astype(np.float32), beta)
    for place in range(len(margins)):
        nudge = np.zeros(len(margins))
        nudge[place] = 1e-4
        slope = (loss(values + nudge) - loss(values - nudge)) / 2e-4
        assert weights[2 * place] == pytest.approx(-slope, abs=1e-5)  # the chosen answer
        assert weights[2 * place + 1] == pytest.approx(slope, abs=1e-5)  # the rejected one


def test_a_kl_penalty_pushes_down_what_is_far_above_the_reference() -> None:
    trajectory = Trajectory([1, 2])
    trajectory.act([3, 4], [-0.1, -0.1])
    trajectory.reward = 1.0
    other = Trajectory([1, 2])
    other.act([3, 5], [-0.1, -0.1])
    group = TrajectoryGroup(PromptUse(0, 0), (trajectory, other))
    recipe = load_recipe("copy-digits", ["grpo.kl=0.5", "grpo.entropy_bonus=0"])
    far = [np.asarray([0.0, 2.0], np.float32), np.asarray([0.0, 0.0], np.float32)]

    def pushes(distances: Any) -> Any:
        data = policy_data(recipe, [group], distances=distances)
        return np.concatenate([datum.loss_fn_inputs["advantages"].data[-2:] for datum in data])

    without, with_kl = pushes(None), pushes(far)
    # by kl * (its distance - the mean distance of 0.5), over the update's four tokens
    assert with_kl - without == pytest.approx([0.0625, -0.1875, 0.0625, 0.0625], abs=1e-6)
    free = replace(recipe, grpo=replace(recipe.grpo, kl=0.0))
    data = policy_data(free, [group], distances=far)
    assert np.concatenate(
        [datum.loss_fn_inputs["advantages"].data[-2:] for datum in data]
    ) == pytest.approx(without)


@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), min_size=1, max_size=8))
def test_the_kl_estimate_is_never_below_zero_and_zero_for_equal_models(
    pairs: list[tuple[float, float]],
) -> None:
    policy = [np.asarray([own for own, _ in pairs], np.float32)]
    reference = [np.asarray([other for _, other in pairs], np.float32)]
    assert kl_estimate(policy, reference) >= -1e-5
    assert kl_estimate(policy, policy) == 0.0
