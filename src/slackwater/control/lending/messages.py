"""What lending consumes as a component of the fleet controller."""

from typing import TypeAlias

from slackwater.control.jobs.events import JobTrained
from slackwater.control.lending.events import LendingEvent
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.control.steps.events import DevicesGranted

LoanEvent: TypeAlias = LendingEvent | TurnOpened | TurnClosed | DevicesGranted | JobTrained

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in LoanEvent.__args__}
