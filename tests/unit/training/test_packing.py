"""Which sequences share a micro-batch."""

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


@given(LENGTHS.filter(bool), st.integers(50, 200))
def test_no_two_micro_batches_would_have_fitted_into_one(lengths: list[int], budget: int) -> None:
    used = sorted(sum(lengths[index] for index in batch) for batch in pack(lengths, budget))
    assert len(used) < 2 or used[0] + used[1] > budget


def test_equal_sequences_keep_their_order() -> None:
    assert pack([4, 4, 4, 4], 8) == [[0, 1], [2, 3]]
