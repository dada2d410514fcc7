"""Controllers that look their handlers up in a table have one for every event that they take."""

from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import EVENT_TYPES
from slackwater.control.rollout.events import EVENT_TYPES as OF_ROLLOUT
from slackwater.control.rollout.manager import RolloutManager


def test_the_rollout_manager_takes_each_of_its_events() -> None:
    assert set(RolloutManager()._handlers) == set(OF_ROLLOUT.values())


def test_the_fleet_controller_routes_each_event_to_a_component() -> None:
    routes = FleetController()._routes
    assert set(routes) == set(EVENT_TYPES.values())
    assert all(routes.values()), [kind for kind, handlers in routes.items() if not handlers]
