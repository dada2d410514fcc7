"""A trajectory's own place: folders that live between its actions, and a user of its own where it
can have one.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slackwater.sandbox.file_workers import FileTask, TaskOutcome


@dataclass(slots=True)
class DiskUse:
    """What is known of an environment's size. `measured`: of how many bytes, as of some moment
    before now.

    `stale`: something has run in it since. `fault` says why it cannot be measured; it counts as too
    large then.
    """

    measured: int = 0
    stale: bool = False
    fault: str = ""
    measuring: bool = False
    last_limit: int = 1 << 30

    def record(self, outcome: TaskOutcome) -> None:
        """Take what a measurement came to; one that failed for want of something is made again."""
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
    """`view` is what an action sees as its home, `tmp` its temporary files; `own` are the folders
    with its changes.

    Between actions it has no process and holds no core. `note` is what its owner wants to find with
    it later. `furnishing` is the work on its files until it can be used, `copying` that on its
    snapshots by name. `readiness` is what the supervisor waits to read from before an action can
    enter it, until `ready_by_s`.
    """

    name: str
    root: Path
    view: Path
    user: int | None
    mounted: bool = False
    note: Mapping[str, str | int] = field(default_factory=dict)
    furnishing: FileTask | None = None
    copying: dict[str, FileTask] = field(default_factory=dict)
    disk: DiskUse = field(default_factory=DiskUse)
    readiness: int | None = None
    ready_by_s: float = 0.0

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def own(self) -> tuple[Path, ...]:
        """The folders whose size is the environment's own."""
        return (self.root / "upper" if self.mounted else self.view, self.tmp)
