"""Which sequences share a micro-batch."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from slackwater.training.packing import pack

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(LENGTHS, st.integers(1, 80))
def test_every_sequence_is_packed_once_and_only_one_above_the_budget_exceeds_it(
    lengths: list[int], budget: int
) -> None:
    batches = pack(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[index] for index in batch) <= budget


@given(LENGTHS, st.integers(1, 80))
def test_neighbours_stay_neighbours_and_a_new_micro_batch_begins_only_when_it_must(
    lengths: list[int], budget: int
) -> None:
    batches = pack(lengths, budget)
    assert [index for batch in batches for index in batch] == list(range(len(lengths)))
    for batch, following in pairwise(batches):
        assert sum(lengths[index] for index in [*batch, following[0]]) > budget
