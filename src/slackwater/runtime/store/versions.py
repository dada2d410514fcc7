"""The weight versions on disk, as far as the service needs them (see `weights/`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class VersionShelf(Protocol):
    """Which versions there are."""

    def path(self, version: str) -> Path:
        """The file of a version, whether it is there or not."""
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
