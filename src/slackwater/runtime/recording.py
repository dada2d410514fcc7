"""The files to which controllers' events are recorded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


class Recording:
    """One file per controller, `<record>.<name>.jsonl`, rewritten at each start; none without a
    path.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._files: list[BinaryIO] = []

    def writer(self, name: str) -> Callable[[bytes], Any] | None:
        """The function that writes a controller's lines; None if nothing is recorded."""
        if self._path is None:
            return None
        file = self._path.with_name(f"{self._path.name}.{name}.jsonl").open("wb")
        self._files.append(file)
        return file.write

    def close(self) -> None:
        for file in self._files:
            file.close()
