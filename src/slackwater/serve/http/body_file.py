"""A large body in a file, which its reader in another process finds by name: no process between
has it in memory.
"""

import contextlib
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

HEADER = b"x-slackwater-body-file"  # of requests that front ends pass on


class BodyFile:
    """A file of the folder from the first write until `close`. No two ever have the same name, so
    that who comes too late finds none, instead of another's.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"body-{secrets.token_hex(16)}"
        self._file: BinaryIO | None = None

    @property
    def path(self) -> Path | None:
        """Where the body is; None where nothing was written."""
        return None if self._file is None else self._path

    def write(self, pieces: Iterable[bytes]) -> None:
        if self._file is None:
            self._file = self._path.open("xb", buffering=0)
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[self._file.write(left) :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            with contextlib.suppress(FileNotFoundError):  # the service has ended
                self._path.unlink()
