"""Storms over the action broker: invariants after every event, one outcome for every action."""

import pytest

from benchmarks.actions.simulated.storm import weather
from slackwater.model.action import OutcomeKind


@pytest.mark.parametrize("seed", range(4))
def test_every_action_ends_once_in_a_storm(seed: int) -> None:
    report = weather(seed, minutes=1.0)
    assert report.submitted > 200
    for kind in (OutcomeKind.DONE, OutcomeKind.TIMED_OUT, OutcomeKind.CANCELLED, OutcomeKind.LOST):
        assert report.outcomes[kind] > 0, f"the storm never met {kind}"
