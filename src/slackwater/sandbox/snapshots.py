"""Snapshots: prepared folders from which environments start in milliseconds.

By overlay (root; copies nothing), by copies with shared blocks, or by plain copies.
"""

import contextlib
import errno
import secrets
import tempfile
from pathlib import Path

from slackwater.model.action_input import check_environment_name
from slackwater.model.errors import NotFoundError, RefusedError
from slackwater.sandbox import linux
from slackwater.sandbox.file_tasks import mount_overlay


class Snapshots:
    """A folder of snapshots by name; `method` is how environments start from one."""

    def __init__(self, folder: Path, method: str) -> None:
        self._folder = folder
        self.method = method
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self._folder.iterdir() if entry.name[0] != ".")

    def find_partial(self) -> list[Path]:
        """Unfinished copies."""
        return [entry for entry in self._folder.iterdir() if entry.name[0] == "."]

    def partial(self, name: str) -> Path:
        """Where a copy is made before it gets its name; names are never reused."""
        check_environment_name("snapshot", name)
        if (self._folder / name).exists():
            raise RefusedError(f"snapshot: {name!r} exists already; take another name")
        return self._folder / f".{secrets.token_hex(8)}"

    def keep(self, partial: Path, name: str) -> None:
        if (self._folder / name).exists():
            raise RefusedError(f"snapshot: {name!r} exists already; take another name")
        partial.rename(self._folder / name)

    def find(self, name: str) -> Path:
        check_environment_name("snapshot", name)
        folder = self._folder / name
        if not folder.is_dir():
            raise NotFoundError(f"snapshot: {name!r} is not on this node; take it first")
        return folder


def choose_method(folder: Path, *, may_mount: bool = True) -> tuple[str, str]:
    """How environments start here, and why no faster method works."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".try-") as probe:
        root = Path(probe)
        (root / "below").mkdir()
        try:
            if not may_mount:
                raise OSError(errno.EPERM, "other processes must see it")
            mount_overlay(str(root / "below"), str(root), None)
            linux.unmount(str(root / "view"))
        except OSError as error:
            why = f"no overlay: {error.strerror}"
        else:
            return "overlay", "overlay"
        first, second = root / "first", root / "second"
        first.write_bytes(b"x" * 4096)
        with contextlib.suppress(OSError), first.open("rb") as old, second.open("wb") as new:
            linux.clone_file(old.fileno(), new.fileno())
            return "shared-blocks", f"copies that share blocks ({why})"
    return "copy", f"plain copies ({why}; no shared blocks)"
