"""A trajectory's own place: folders that live between its actions, and a user of its own where there can be one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Environment:
    """`view` is what an action sees as its home, `tmp` its temporary files; `own` are the folders with its changes.

    Between actions it has no process and holds no core. `note` is what its owner wants to find with it later.
    """

    name: str
    root: Path
    view: Path
    user: int | None
    mounted: bool = False
    note: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def own(self) -> tuple[Path, ...]:
        """The folders whose size is the environment's own."""
        return (self.root / "upper" if self.mounted else self.view, self.tmp)
