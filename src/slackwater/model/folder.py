"""Files that appear whole, locks on files, and folders that must not change while in use."""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slackwater.model.errors import UnavailableError


def fingerprint(folder: Path) -> str:
    """A digest that changes when a file of the folder is added, removed, resized or written."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for file in sorted(folder.iterdir()):
            if file.is_file():
                stat = file.stat()
                rows.append((file.name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def describe_change(uri: object) -> str:
    """The error for a model whose folder changed after the service started."""
    return f"{uri}: its files changed while the service runs; restart the service to use them"


def write_whole(path: Path, text: str) -> None:
    """Write a private file; readers see the old text or the new, never a part."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UnavailableError(f"{path} cannot be written: {error.strerror}") from None


def read_object(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is none that can be read."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def try_lock(file: Path) -> int | None:
    """A descriptor that holds the file's lock; None while another process holds it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def partial_folder(directory: Path) -> Iterator[Path]:
    """A new folder beside `directory`, removed at the end unless it was moved away; also removes
    those that killed processes left.
    """
    for left in directory.parent.glob(f".{glob.escape(directory.name)}.*.partial"):
        with contextlib.suppress(OSError), _lock_folder(left):
            shutil.rmtree(left, ignore_errors=True)
    partial = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir(parents=True)
    with _lock_folder(partial):
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder; BlockingIOError while another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_locked(file: Path) -> bool:
    """Whether a live process holds the file's lock."""
    if not file.exists():
        return False
    descriptor = try_lock(file)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None
