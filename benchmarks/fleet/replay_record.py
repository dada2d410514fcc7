"""Feeds the records of one run to fresh controllers, of this version or of one before the fleet
controller; prints how many events agreed, by record, and the line of the first that did not.

    python replay_record.py RECORD CONFIG

A script of its own, since it runs under the older version's modules.
"""

import json
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any


def controllers(config: str) -> dict[str, tuple[Any, dict[str, type]]]:
    """By the name of the record: as the service with this configuration made them."""
    from slackwater.model.config import decode
    from slackwater.runtime.settings import ServiceSettings

    settings = decode(ServiceSettings, tomllib.loads(Path(config).read_text()))
    try:
        from slackwater.runtime.fleet_controller import new_fleet_controller
    except ImportError:
        return _before(settings)
    from slackwater.control.fleet.messages import EVENT_TYPES

    return {"fleet": (new_fleet_controller(settings), EVENT_TYPES)}


def _before(settings: Any) -> dict[str, tuple[Any, dict[str, type]]]:
    """Three controllers that the runtime connected."""
    shared, (rollout_nodes, train_nodes) = settings.coschedule, settings.coscheduled_nodes
    scheduler = shared.new_coscheduler(len(rollout_nodes), len(train_nodes))
    with_phases = {"coscheduler": scheduler, "limits": shared.limits}
    brain = import_module("slackwater.control.brain")
    operations = import_module("slackwater.control.operations.controller")
    lender = import_module("slackwater.control.lending.lender")
    of_operation = import_module("slackwater.control.operations.events")
    of_lending = import_module("slackwater.control.lending.events")
    return {
        "brain": (brain.Brain(settings.rollout_settings, **with_phases), brain.EVENT_TYPES),
        "operations": (
            operations.OperationsController(settings.operations),
            of_operation.EVENT_TYPES,
        ),
        "lending": (lender.Lender(), of_lending.EVENT_TYPES),
    }


def main(record: str, config: str) -> None:
    """Print one JSON object."""
    from slackwater.control.record import replay

    found: dict[str, object] = {}
    for name, (controller, types) in controllers(config).items():
        with Path(f"{record}.{name}.jsonl").open("rb") as lines:
            agreed, divergence = replay(controller, lines, types)
        found[name] = [agreed, None if divergence is None else divergence.line]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
