"""Builds a service's fleet controller from its settings: to run it, or to replay a record."""

from slackwater.control.fleet.controller import FleetController
from slackwater.control.lending.lender import LendingController
from slackwater.runtime.settings import ServiceSettings


def new_fleet_controller(settings: ServiceSettings) -> FleetController:
    """A controller that has seen no event yet."""
    shared, served = settings.coschedule, settings.serving
    coscheduler = None
    if shared is not None:
        rollout_nodes, train_nodes = settings.coscheduled_nodes
        counts = (len(rollout_nodes), len(train_nodes))
        coscheduler = shared.new_coscheduler(*counts, settings.coscheduled_sizes)
    lending = None
    if served is not None:
        lending = LendingController([name for name in settings.models if name != served.model])
    return FleetController(
        settings.rollout_settings,
        coscheduler=coscheduler,
        limits=None if shared is None else shared.limits,
        operations=settings.operations,
        lending=lending,
    )
