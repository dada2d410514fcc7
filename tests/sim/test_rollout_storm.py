"""Random faults from seeds; the whole thousand hours are `slackwater bench rollout_faults`."""

from typing import Any

import pytest

from benchmarks.rollout.storm import weather
from slackwater.control.rollout.dispatcher import Dispatcher
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.membership import Membership
from slackwater.control.steps.tracker import StepTracker
from slackwater.model.ids import InstanceId


@pytest.mark.parametrize("seed", range(4))
def test_no_storm_breaks_an_invariant_and_every_turn_ends(seed: int) -> None:
    report = weather(seed, hours=0.5)
    assert report.completed_turns > 100
    assert report.moved_turns > 0


def test_the_same_seed_is_the_same_storm() -> None:
    assert weather(11, hours=0.2) == weather(11, hours=0.2)


def test_a_manager_that_forgets_to_roll_back_a_lie_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LiveTurn, "roll_back", lambda self: None)
    monkeypatch.setattr(
        "slackwater.control.rollout.manager.Ownership._contradiction",
        staticmethod(lambda turn, event, limit: None),
    )
    with pytest.raises(AssertionError):
        for seed in range(20):
            weather(seed, hours=0.5)


def test_a_manager_that_loses_tokens_on_a_move_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Dispatcher.resume

    def forgetful(self: Dispatcher, turn: LiveTurn) -> None:
        if turn.tokens:
            turn.tokens.pop(0)
            turn.logprobs.pop(0)
        honest(self, turn)

    monkeypatch.setattr(Dispatcher, "resume", forgetful)
    with pytest.raises(AssertionError):
        for seed in range(20):
            weather(seed, hours=0.5)


def test_a_manager_that_leaves_local_engines_at_work_when_seeding_ends_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Membership, "hand_over", lambda self, record, why: None)
    with pytest.raises(AssertionError, match="works unasked"):
        weather(0, hours=0.5)


def test_devices_granted_before_a_sleeping_engine_has_left_them_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = StepTracker._rest

    def hasty(self: StepTracker, instance: InstanceId, *rest: Any) -> None:
        honest(self, instance, *rest)
        self._leaving.clear()

    monkeypatch.setattr(StepTracker, "_rest", hasty)
    with pytest.raises(AssertionError, match="on devices that trainer"):
        for seed in range(4):
            weather(seed, hours=0.5)


def test_an_engine_that_never_says_that_it_rests_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTracker, "_end_restless", lambda self, instance: None)
    with pytest.raises(AssertionError, match="never ended"):
        for seed in range(5, 15):
            weather(seed, hours=0.5)
