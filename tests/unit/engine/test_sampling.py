"""Sampling: right distribution, addressed randomness, truncation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.engine.cpu.executor import apply_top_k_top_p, sample
from slackwater.engine.executor import SamplingColumns
from slackwater.engine.slots import stream_keys, uniforms


def columns(rows: int, seed: int = 0, **settings_: float) -> SamplingColumns:
    keys = stream_keys(np.arange(seed, seed + rows, dtype=np.uint64))
    return SamplingColumns(
        np.full(rows, settings_.get("temperature", 1.0), np.float32),
        np.full(rows, settings_.get("top_p", 1.0), np.float32),
        np.full(rows, settings_.get("top_k", 0), np.int64),
        uniforms(keys, np.arange(rows)),
    )


def test_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    by_seed = uniforms(
        stream_keys(np.arange(100_000, dtype=np.uint64)), np.zeros(100_000, np.int64)
    )
    one_key = np.repeat(stream_keys(np.array([7], np.uint64)), 100_000)
    by_position = uniforms(one_key, np.arange(100_000))
    for numbers in (by_seed, by_position):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = np.histogram(numbers, 50, (0, 1))[0]
        chi_squared = ((counts - 2000) ** 2 / 2000).sum()
        assert chi_squared < 95, "99.99 % of uniform samples stay below"
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(by_seed, by_position)[0, 1]) < 0.02


def test_a_number_depends_on_its_seed_and_position_alone() -> None:
    keys = stream_keys(np.array([3, 9, 3], np.uint64))
    first = uniforms(keys, np.array([5, 5, 6]))
    assert first[0] == uniforms(keys[:1], np.array([5]))[0]
    assert len(set(first.tolist())) == 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_distribution_says(temperature: float) -> None:
    logits = np.random.default_rng(1).normal(0, 1.5, 200).astype(np.float32)
    rows = 40_000
    tokens, logprobs = sample(np.tile(logits, (rows, 1)), columns(rows, temperature=temperature))
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = weights / weights.sum()
    counts = np.bincount(tokens, minlength=200)
    common = expected * rows > 5
    chi_squared = ((counts - expected * rows) ** 2 / (expected * rows))[common].sum()
    assert chi_squared < common.sum() + 5 * np.sqrt(2 * common.sum())
    np.testing.assert_allclose(logprobs, np.log(expected)[tokens], atol=2e-5)


def test_temperature_0_takes_the_likeliest_with_its_own_logprob() -> None:
    logits = np.array([[0.0, 3.0, 3.0, -1.0]], np.float32)
    tokens, logprobs = sample(logits, columns(1, temperature=0.0))
    assert tokens.tolist() == [1], "of equals the first"
    assert logprobs[0] == pytest.approx(3 - np.log(np.exp(logits[0]).sum()), abs=1e-6)


def test_a_row_is_sampled_the_same_alone_and_among_others() -> None:
    logits = np.random.default_rng(2).normal(0, 2, (64, 1000)).astype(np.float32)
    every = columns(64, top_p=0.9, top_k=50)
    tokens, logprobs = sample(logits, every)
    for row in (0, 17, 63):
        alone = SamplingColumns(
            every.temperature[row : row + 1],
            every.top_p[row : row + 1],
            every.top_k[row : row + 1],
            every.uniform[row : row + 1],
        )
        one_token, one_logprob = sample(logits[row : row + 1], alone)
        assert one_token[0] == tokens[row]
        assert one_logprob[0] == logprobs[row]


def test_logprobs_are_of_the_whole_distribution_though_tokens_are_cut() -> None:
    logits = np.random.default_rng(2).normal(0, 2, 300).astype(np.float32)
    tokens, logprobs = sample(np.tile(logits, (500, 1)), columns(500, top_k=5))
    best = set(np.argsort(-logits)[:5].tolist())
    assert set(tokens.tolist()) == best
    whole = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    np.testing.assert_allclose(logprobs, whole[tokens], atol=2e-5)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000),
    st.integers(1, 900),
    st.floats(0.01, 1.0),
    st.one_of(st.just(0), st.integers(1, 1000)),
)
def test_truncation_keeps_the_fewest_heaviest_tokens_that_reach_top_p(
    seed: int, vocabulary: int, top_p: float, top_k: int
) -> None:
    weights = np.random.default_rng(seed).exponential(1, vocabulary).astype(np.float32) ** 3
    kept = apply_top_k_top_p(weights, top_p, top_k)
    order = np.argsort(-weights, kind="stable")[: top_k or vocabulary]
    assert kept.tolist() == order[: len(kept)].tolist(), "the heaviest, in order"
    mass = np.cumsum(weights[order], dtype=np.float64)
    goal = top_p * mass[-1]
    if len(kept) < len(order):
        assert mass[len(kept) - 1] >= goal * (1 - 1e-6)
    if len(kept) > 1:
        assert mass[len(kept) - 2] < goal * (1 + 1e-6), "one fewer would not do"
