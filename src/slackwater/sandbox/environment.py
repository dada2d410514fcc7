"""A trajectory's environment: folders that persist between its actions, and its own user.

Paths are plain strings: Python 3.12 interns every name that a `Path` has seen, and environments'
names do not recur.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from slackwater.sandbox.file_workers import FileTask, TaskOutcome


@dataclass(slots=True)
class DiskUse:
    """An environment's disk usage: `measured` bytes as of a recent moment.

    `stale`: something has run since. `fault`: why it cannot be measured; it then counts as too
    large.
    """

    measured: int = 0
    stale: bool = False
    fault: str = ""
    measuring: bool = False
    last_limit: int = 1 << 30

    def record(self, outcome: TaskOutcome) -> None:
        """Record a measurement; transient failures are repeated."""
        self.measuring = False
        if outcome.error is None:
            self.measured, self.fault = int(outcome.value), ""
        elif outcome.hostile:
            self.measured, self.fault = sys.maxsize, outcome.error
        else:
            self.stale = True

    def excess(self, limit: int) -> str:
        """Why that is more than `limit` bytes; empty if it is not."""
        if self.measured <= limit:
            return ""
        if self.fault:
            return f"its environment's files cannot be measured: {self.fault}"
        return f"its environment has more than {limit} bytes of files"


@dataclass(slots=True, eq=False)
class Environment:
    """`view` is an action's home, `tmp` its temporary folder.

    Between actions it has no process and occupies no core. `note` is its owner's record.
    `populating` is the file task before it is usable, `copying` the snapshots in progress by name.
    `readiness` is a descriptor that becomes readable when an action can enter; the supervisor waits
    for it until `ready_by_s`.
    """

    name: str
    root: str
    user: int | None
    mounted: bool = False
    note: Mapping[str, str | int] = field(default_factory=dict)
    populating: FileTask | None = None
    copying: dict[str, FileTask] = field(default_factory=dict)
    disk: DiskUse = field(default_factory=DiskUse)
    readiness: int | None = None
    ready_by_s: float = 0.0

    @property
    def view(self) -> str:
        return f"{self.root}/view"

    @property
    def tmp(self) -> str:
        return f"{self.root}/tmp"

    @property
    def changed_folders(self) -> list[str]:
        """The folders with an action's changes, which count as the environment's size."""
        return [f"{self.root}/upper" if self.mounted else self.view, self.tmp]
