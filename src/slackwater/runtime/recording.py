"""The files to which controllers' events are recorded."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any


class Recording:
    """One file per controller, `<record>.<name>.jsonl`, rewritten at each start; none without a
    path.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._files = ExitStack()

    def writer(self, name: str) -> Callable[[bytes], Any] | None:
        """The function that writes a controller's lines; None if nothing is recorded."""
        if self._path is None:
            return None
        path = self._path.with_name(f"{self._path.name}.{name}.jsonl")
        return self._files.enter_context(path.open("wb")).write

    def close(self) -> None:
        self._files.close()
