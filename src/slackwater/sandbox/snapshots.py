"""Prepared environments: a folder kept once, from which others begin in milliseconds.

Ways, tried at start: an overlay (root: the snapshot lies below, changes go on top), copies that share their blocks
(file systems that can), plain copies. With an overlay nothing is copied at all.
"""

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from slackwater.model.errors import NotFoundError, RefusedError
from slackwater.sandbox import linux


class Snapshots:
    """A folder of snapshots by name; `way` says how environments begin from one."""

    def __init__(self, folder: Path, way: str) -> None:
        self._folder = folder
        self.way = way
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self._folder.iterdir() if entry.name[0] != ".")

    def take(self, name: str, view: Path) -> None:
        """Keep a copy of a view. A name is used once: environments may stand on it."""
        if (self._folder / name).exists():
            raise RefusedError(f"snapshot: {name!r} is there already; take another name")
        partial = self._folder / f".{name}.{secrets.token_hex(4)}"
        try:
            copy_tree(view, partial, for_all=True)
            partial.rename(self._folder / name)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise RefusedError(f"snapshot {name!r} cannot be kept: {error}") from None

    def find(self, name: str) -> Path:
        folder = self._folder / name
        if name.startswith(".") or "/" in name or not folder.is_dir():
            raise NotFoundError(f"snapshot: {name!r} is not on this node; take it first")
        return folder

    def begin(self, name: str, root: Path, user: int | None) -> bool:
        """Make `root/view` out of a snapshot; whether it is a mount over `root/upper`."""
        below, view = self.find(name), root / "view"
        if self.way == "overlay":
            lay_over(below, root, user)
            return True
        copy_tree(below, view, user=user)
        return False


def lay_over(below: Path, root: Path, user: int | None) -> None:
    """Mount `root/view` with a snapshot below and `root/upper` on top."""
    for name in ("view", "upper", "shadow"):
        (root / name).mkdir(exist_ok=True, mode=0o700)
    if user is not None:
        os.chown(root / "upper", user, user)
    options = f"lowerdir={below},upperdir={root / 'upper'},workdir={root / 'shadow'}"
    linux.mount("overlay", str(root / "view"), "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)


def copy_tree(
    source: Path, target: Path, *, user: int | None = None, for_all: bool = False
) -> None:
    """Files, folders and links; blocks are shared where the file system can. `for_all`: anybody may change them."""
    target.mkdir(mode=0o700)
    for entry in os.scandir(source):
        to, mode = target / entry.name, entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            to.symlink_to(Path(entry.path).readlink())
        elif stat.S_ISDIR(mode):
            copy_tree(Path(entry.path), to, user=user, for_all=for_all)
            continue
        elif stat.S_ISREG(mode):
            _copy_file(Path(entry.path), to)
            to.chmod(stat.S_IMODE(mode) & 0o777 | (0o666 if for_all else 0o600))
        else:
            continue  # sockets and pipes have no content
        if user is not None:
            os.chown(to, user, user, follow_symlinks=False)
    mode = stat.S_IMODE(source.stat().st_mode) & 0o777
    target.chmod(mode | (0o777 if for_all else 0o700))
    if user is not None:
        os.chown(target, user, user)


def _copy_file(source: Path, target: Path) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(source, flags), "rb") as old, target.open("xb") as new:
        try:
            linux.clone_file(old.fileno(), new.fileno())
        except OSError:
            while os.sendfile(new.fileno(), old.fileno(), None, 1 << 24):
                pass


def choose_way(folder: Path, *, may_mount: bool = True) -> tuple[str, str]:
    """How environments begin here, and why not in a faster way."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".try-") as tried:
        root = Path(tried)
        (root / "below").mkdir()
        try:
            if not may_mount:
                raise OSError(errno.EPERM, "others must see it")
            lay_over(root / "below", root, None)
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
