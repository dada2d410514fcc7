"""Flights: what each trainer does now, and the publishes that it writes beside them."""

from dataclasses import dataclass
from typing import TypeAlias

from slackwater.control.operations.model_queue import LogEntry, ModelQueue
from slackwater.model.ids import WorkerId
from slackwater.model.operation import Operation


@dataclass(frozen=True, slots=True)
class Restore:
    """The trainer loads the saved state."""

    ticket: int
    queue: ModelQueue


@dataclass(frozen=True, slots=True)
class Replay:
    """The trainer applies an entry of the log to the state."""

    ticket: int
    queue: ModelQueue
    entry: LogEntry


@dataclass(frozen=True, slots=True)
class RunHead:
    """The trainer runs the head of the queue."""

    ticket: int
    queue: ModelQueue
    operation: Operation


@dataclass(frozen=True, slots=True)
class SnapshotFlight:
    """The trainer saves the state after an operation, which ends only then if `finishes`."""

    ticket: int
    queue: ModelQueue
    operation: Operation
    finishes: bool


Flight: TypeAlias = Restore | Replay | RunHead | SnapshotFlight


def runs_head(flight: Flight) -> bool:
    """Whether the end of the flight ends the head of the queue."""
    return isinstance(flight, RunHead) or (isinstance(flight, SnapshotFlight) and flight.finishes)


@dataclass(frozen=True, slots=True)
class DetachedPublish:
    """A publish that a trainer writes during its next operations."""

    worker: WorkerId
    queue: ModelQueue
    operation: Operation
