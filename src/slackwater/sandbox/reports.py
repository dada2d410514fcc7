"""Reports of a supervisor on actions, environments and snapshots."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias


class End(StrEnum):
    """Why an action ended. All but `exited` and `not_started` mean that it was killed."""

    EXITED = "exited"
    NOT_STARTED = "not_started"
    STOPPED = "stopped"  # by a request
    WALL = "wall"
    OUTPUT = "output"
    MEMORY = "memory"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Usage:
    """What an action used: `launch_s` to confine and start it, `run_s` until its first process
    ended.
    """

    launch_s: float = 0.0
    run_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0


@dataclass(frozen=True, slots=True)
class OutputPrinted:
    """A piece of output."""

    action: str
    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True, slots=True)
class ActionEnded:
    """Its processes are gone; `status` is the exit status, or minus the signal."""

    action: str
    end: End
    status: int
    usage: Usage
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EnvironmentCreated:
    """Its files are in place; actions that waited for it have been started."""

    environment: str


@dataclass(frozen=True, slots=True)
class EnvironmentCreationFailed:
    """It could not be created."""

    environment: str
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotEnded:
    """A snapshot was kept, or `error` says why not."""

    name: str
    error: str | None
    size_bytes: int = 0


Report: TypeAlias = (
    OutputPrinted | ActionEnded | EnvironmentCreated | EnvironmentCreationFailed | SnapshotEnded
)
