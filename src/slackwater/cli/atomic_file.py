"""Writes files atomically: complete or not at all."""

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from slackwater.model.errors import ConfigError


def check_place(path: Path | None, flag: str) -> None:
    """Refuse a path that cannot be written; call it before hours of work."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError.of(flag, str(path), "must be a file in a folder that exists")


@contextlib.contextmanager
def atomic_file(path: Path, flag: str) -> Iterator[IO[bytes]]:
    """A file that appears as `path` only if the block succeeds; errors name `flag`."""
    check_place(path, flag)
    try:
        number, part = tempfile.mkstemp(".part", f".{path.name}.", path.parent)
    except OSError as error:
        raise ConfigError.of(flag, str(path), f"cannot be written: {error.strerror}") from None
    here = Path(part)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
        here.chmod(0o644)
        here.replace(path)
    finally:
        here.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes, flag: str) -> None:
    """Replace the content of `path`."""
    with atomic_file(path, flag) as file:
        file.write(content)


def unwind_on_terminate() -> None:
    """Let SIGTERM unwind the stack like Ctrl-C, so that partial files are removed (exit 143)."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + number)
