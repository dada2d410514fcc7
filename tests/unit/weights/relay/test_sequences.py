"""Random sequences of publishes, joins, kills and restarts end well."""

import pytest

from harness.weight_sequences import Outcome, run_sequence


@pytest.mark.parametrize("seed", range(6))
def test_every_receiver_ends_at_the_newest_version_and_nothing_torn_is_served(seed: int) -> None:
    outcome = Outcome()
    run_sequence(seed, outcome)
    assert (outcome.torn, outcome.behind, outcome.above_bound) == (0, 0, 0), outcome
