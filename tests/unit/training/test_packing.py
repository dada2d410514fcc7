"""Which sequences share a micro-batch."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slackwater.nets.config import NetConfig
from slackwater.training.packed_pass import MicroBatch, pack

COSTS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 49)), max_size=40)


def apart(costs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """What each costs first in its micro-batch, and behind the one before it: never more."""
    return [alone for alone, _ in costs], [max(alone - saved, 0) for alone, saved in costs]


def cost(batch: list[int], alone: list[int], further: list[int]) -> int:
    return alone[batch[0]] + sum(further[index] for index in batch[1:])


@given(COSTS, st.integers(1, 80))
def test_every_sequence_is_packed_once_and_only_one_above_the_budget_exceeds_it(
    costs: list[tuple[int, int]], budget: int
) -> None:
    alone, further = apart(costs)
    batches = pack(alone, further, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(costs)))
    for batch in batches:
        assert len(batch) == 1 or cost(batch, alone, further) <= budget


@given(COSTS, st.integers(1, 80))
def test_neighbours_stay_neighbours_and_a_new_micro_batch_begins_only_when_it_must(
    costs: list[tuple[int, int]], budget: int
) -> None:
    alone, further = apart(costs)
    batches = pack(alone, further, budget)
    assert [index for batch in batches for index in batch] == list(range(len(costs)))
    for batch, following in pairwise(batches):
        assert cost([*batch, following[0]], alone, further) > budget


def test_samples_of_one_prompt_count_by_the_rows_they_add() -> None:
    micro_batch = MicroBatch(tokens=300, keys_per_token=10, recompute=False)
    prompt = np.arange(100)
    samples = [np.concatenate([prompt, np.full(5, 1000 + n)]) for n in range(20)]
    strangers = [np.arange(105) + 2000 * n for n in range(1, 21)]
    assert [len(batch) for batch in micro_batch.plan(samples)] == [12, 8]
    assert max(len(batch) for batch in micro_batch.plan(strangers)) == 2


def test_the_keys_that_many_samples_look_at_bound_a_micro_batch_too() -> None:
    micro_batch = MicroBatch.for_torch_ops(NetConfig(), element_bytes=4)
    keys = 100 * micro_batch.keys_per_token
    prompt = np.arange(keys)
    samples = [np.append(prompt, keys + n) for n in range(1000)]
    fullest = max(len(batch) for batch in micro_batch.plan(samples))
    assert 1 < fullest <= micro_batch.tokens // 100
