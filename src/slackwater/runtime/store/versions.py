"""The weight versions on disk, as far as the service needs them (see `weights/`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class VersionShelf(Protocol):
    """Which versions there are."""

    def paths(self, version: str) -> tuple[Path, ...]:
        """The files that hold a version, or the one that is missing; several ranks write one
        each.
        """
        ...

    def join(self, version: str, target: Path) -> None:
        """Write what several ranks wrote of a version as one file."""
        ...

    def meta(self, version: str) -> Mapping[str, Any]:
        """What its publisher said of a version."""
        ...

    def versions(self) -> tuple[str, ...]:
        """Every visible version."""
        ...

    def drop(self, version: str) -> None:
        """Delete one version."""
        ...
