"""Sequences that begin alike share rows, and nothing else changes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from trainer_builders import NET, trainer

from slackwater.training import shared_attention
from slackwater.training.datum import Datum
from slackwater.training.shared_attention import share_prefixes

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


@given(SEQUENCES)
def test_every_sequence_can_be_read_off_its_rows_and_no_neighbour_repeats_a_prefix(
    given_sequences: list[list[int]],
) -> None:
    sequences = [np.asarray(sequence, np.int64) for sequence in given_sequences]
    shared = share_prefixes(sequences)
    for sequence, rows in zip(sequences, shared.rows, strict=True):
        np.testing.assert_array_equal(shared.tokens[rows], sequence)
        np.testing.assert_array_equal(shared.positions[rows], np.arange(len(sequence)))
    for before, after, start in zip(sequences, sequences[1:], shared.own_from[1:], strict=False):
        same = before[: start + 1].tolist() == after[: start + 1].tolist()
        assert not same or start == min(len(before), len(after))
    own = sum(len(s) - start for s, start in zip(sequences, shared.own_from, strict=True))
    assert own == shared.count


def grouped_data() -> list[Datum]:
    """Groups of samples of one prompt, one sample twice, and lengths that differ."""
    rng, data = np.random.default_rng(0), []
    for prompt_length, lengths in ((9, (20, 14, 14, 31)), (3, (5, 12)), (12, (12, 13))):
        prompt = rng.integers(0, NET.vocab_size, prompt_length)
        for length in lengths:
            rest = rng.integers(0, NET.vocab_size, length - prompt_length)
            tokens = np.concatenate([prompt, rest])
            inputs: dict[str, NDArray[np.generic]] = {
                "target_tokens": rng.integers(0, NET.vocab_size, length),
                "logprobs": (-4 + rng.normal(size=length)).astype(np.float32),
                "advantages": rng.normal(size=length).astype(np.float32),
            }
            data.append(Datum(tokens, inputs))
    return [*data, data[-1]]


@pytest.mark.parametrize("short", [128, 16, 0])
def test_sharing_gives_the_logprobs_and_the_gradient_of_sequences_one_by_one(
    short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_attention, "SHORT", short)
    together, apart = trainer(), trainer()
    output = together.forward_backward(grouped_data(), "ppo", {})
    for datum, logprobs in zip(grouped_data(), output.logprobs, strict=True):
        alone = apart.forward_backward([datum], "ppo", {})
        np.testing.assert_allclose(logprobs, alone.logprobs[0], atol=1e-5)
    for name, gradient in apart.gradient().items():
        torch.testing.assert_close(together.gradient()[name], gradient, rtol=1e-4, atol=2e-5)
