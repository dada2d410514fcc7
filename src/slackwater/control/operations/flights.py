"""What trainers are doing: one flight each, and publishes that are written beside it."""

from dataclasses import dataclass
from typing import TypeAlias

from slackwater.control.operations.model_queue import LogEntry, ModelQueue
from slackwater.model.ids import WorkerId
from slackwater.model.operation import Operation


@dataclass(frozen=True, slots=True)
class Restore:
    """The saved state is brought to the trainer."""

    ticket: int
    line: ModelQueue


@dataclass(frozen=True, slots=True)
class Replay:
    """The effect of an entry of the log is brought to the state."""

    ticket: int
    line: ModelQueue
    entry: LogEntry


@dataclass(frozen=True, slots=True)
class RunHead:
    """The operation whose turn it is runs."""

    ticket: int
    line: ModelQueue
    operation: Operation


@dataclass(frozen=True, slots=True)
class SnapshotFlight:
    """The state after an operation is saved; `finishes` if the operation is over only then."""

    ticket: int
    line: ModelQueue
    operation: Operation
    finishes: bool


Flight: TypeAlias = Restore | Replay | RunHead | SnapshotFlight


def runs_head(flight: Flight) -> bool:
    """Whether the head of the line depends on how it ends."""
    return isinstance(flight, RunHead) or (isinstance(flight, SnapshotFlight) and flight.finishes)


@dataclass(frozen=True, slots=True)
class DetachedPublish:
    """A publish that a trainer writes beside its next operations."""

    worker: WorkerId
    line: ModelQueue
    operation: Operation
