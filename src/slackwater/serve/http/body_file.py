"""Large bodies in files, so that processes pass on a name and not the bytes."""

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

HEADER = b"x-slackwater-body-file"  # header of forwarded requests: the path of the body


class BodyFile:
    """A file from the first write until `close`.

    Names are never reused, so that a late reader finds no file instead of another body.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _name(os.getpid(), secrets.token_hex(16))
        self._file: BinaryIO | None = None

    @property
    def path(self) -> Path | None:
        """The file's path; None if nothing was written."""
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
            with contextlib.suppress(FileNotFoundError):  # the service removed its folder
                self._path.unlink()


def remove_body_files(folder: Path, process: int) -> None:
    """Remove the bodies that a process left when it was killed."""
    for body in folder.glob(_name(process, "?" * 32)):
        body.unlink(missing_ok=True)


def _name(process: int, name: str) -> str:
    return f"body-{process}-{name}"
