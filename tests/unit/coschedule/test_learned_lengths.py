"""Bounds on mean phase lengths."""

import numpy as np
import pytest

from slackwater.policy.learned_lengths import LengthEstimate


def estimate(lengths: list[float]) -> LengthEstimate:
    made = LengthEstimate()
    for length in lengths:
        made.add(length)
    return made


def test_before_anything_was_seen_the_worst_case_is_the_bound() -> None:
    assert LengthEstimate().mean_bound_s(300, 0.05) == 300


def test_the_bound_never_passes_the_worst_case() -> None:
    assert estimate([290, 300, 295]).mean_bound_s(300, 0.05) == 300


def test_more_observations_bring_the_bound_nearer_to_the_mean() -> None:
    bounds = [estimate([100.0, 120.0] * n).mean_bound_s(300, 0.05) for n in (20, 100, 1000)]
    assert bounds[0] > bounds[1] > bounds[2] > 110


def test_equal_lengths_leave_room_for_what_was_not_seen_yet() -> None:
    assert estimate([100.0] * 30).mean_bound_s(300, 0.05) > 150


@pytest.mark.parametrize("samples", [12, 60, 300])
def test_the_bound_is_missed_no_more_often_than_said(samples: int) -> None:
    generator = np.random.default_rng(7)
    median, worst_s = 75.0, 300.0
    truth = np.minimum(generator.lognormal(np.log(median), 0.9, 200_000), worst_s).mean()
    missed = 0
    for _ in range(400):
        drawn = np.minimum(generator.lognormal(np.log(median), 0.9, samples), worst_s)
        missed += estimate(drawn.tolist()).mean_bound_s(worst_s, 0.05) < truth
    assert missed / 400 <= 0.05
