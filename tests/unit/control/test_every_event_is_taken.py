"""Controllers that look their handlers up in a table have one for every event that they say they take."""

from slackwater.control.brain import EVENT_TYPES, Brain
from slackwater.control.rollout.events import EVENT_TYPES as OF_ROLLOUT
from slackwater.control.rollout.manager import RolloutManager


def test_the_rollout_manager_takes_each_of_its_events() -> None:
    assert set(RolloutManager()._handlers) == set(OF_ROLLOUT.values())


def test_the_brain_hands_each_event_to_a_part() -> None:
    assert set(Brain()._takers) == set(EVENT_TYPES.values())
