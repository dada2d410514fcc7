"""A start that fails leaves the folder as it found it."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from slackwater.runtime.store.state_directory import StateDirectory


def entries(root: Path) -> frozenset[str] | None:
    """What a folder holds; None if it is not there."""
    return frozenset(path.name for path in root.iterdir()) if root.is_dir() else None


@contextlib.contextmanager
def removing_failed_start(root: Path) -> Iterator[StateDirectory]:
    """The folder, locked. What was made in it is removed unless the service came up."""
    before = entries(root)
    folder = StateDirectory(root)
    folder.lock()
    try:
        yield folder
    finally:
        came_up = (folder.read_server() or {}).get("pid") == os.getpid()
        if not came_up:
            remove_new(root, before)
        folder.unlock()


def remove_new(root: Path, before: frozenset[str] | None) -> None:
    """Remove what the folder gained, and itself if it is new. The caller holds the lock."""
    gained = (entries(root) or frozenset()) - (before or frozenset())
    for name in sorted(gained, key=lambda name: name == "lock"):  # last: it keeps others out
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if before is None:
        with contextlib.suppress(OSError):
            root.rmdir()
