"""The mounts of root's plain process: private temporary folders."""

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slackwater.sandbox import linux

SHARED_TMP = ("/tmp", "/var/tmp", "/dev/shm")
# What is written to a cover stays in memory, on the account of some action, for as long as the
# environment lives.
COVER_BYTES = 65536
_COVER = f"size={COVER_BYTES}"


@dataclass(frozen=True, slots=True)
class UnreachableFolder:
    """A folder that other users can read but not reach, because of `barrier` above it."""

    barrier: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class Mounts:
    """`own_tmp` covers the machine's temporary folders; `folder` and `shown` stay reachable."""

    folder: Path
    own_tmp: Path
    shown: Sequence[UnreachableFolder] = ()

    @property
    def tmp(self) -> str:
        """Where the action finds its own temporary files."""
        return tmp_beside(self._needed)

    @property
    def _needed(self) -> tuple[Path, ...]:
        return (self.folder, *(one.folder for one in self.shown))

    def make(self) -> None:
        """Make the mounts in this process, which then has its own mount namespace.

        Folders disappear on the way, so they are opened first and mounted by descriptor. A cover
        over a needed folder is always fresh: in its own folder an action could have left a symlink.
        """
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
        with contextlib.ExitStack() as opened:
            self._mount(opened)

    def _mount(self, opened: contextlib.ExitStack) -> None:
        needed = {path: _opened(path, opened) for path in self._needed}
        covered = {one.barrier for one in self.shown} - {Path(shared) for shared in SHARED_TMP}
        for barrier in covered:
            linux.mount("none", str(barrier), "tmpfs", linux.MS_NOSUID, f"mode=755,{_COVER}")
        tmp = _opened(self.own_tmp, opened)
        for shared in SHARED_TMP:
            if has_any(shared, needed):
                linux.mount("none", shared, "tmpfs", linux.MS_NOSUID, f"mode=1777,{_COVER}")
                covered.add(Path(shared))
            elif os.path.isdir(shared):  # noqa: PTH112
                linux.mount(f"/proc/self/fd/{tmp}", shared, flags=linux.MS_BIND)
        for path, descriptor in needed.items():
            if any(path.is_relative_to(cover) for cover in covered):
                path.mkdir(parents=True, exist_ok=True)
                linux.mount(f"/proc/self/fd/{descriptor}", str(path), flags=linux.MS_BIND)


def has_any(shared: str, folders: Iterable[Path]) -> bool:
    """Whether this temporary folder holds one of the folders, so that it needs a fresh cover."""
    return any(folder.is_relative_to(shared) for folder in folders)


def tmp_beside(folders: Iterable[Path]) -> str:
    """The first temporary folder that holds none of the folders: the action's own."""
    known = tuple(folders)
    return next((shared for shared in SHARED_TMP if not has_any(shared, known)), SHARED_TMP[0])


def _opened(path: Path, opened: contextlib.ExitStack) -> int:
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    opened.callback(os.close, descriptor)
    return descriptor


def barrier_of(folder: Path) -> Path | None:
    """The highest folder above that strangers may not pass through; None if they can reach it."""
    for above in reversed(folder.resolve().parents):
        if not above.stat().st_mode & 0o001:
            return above
    return None
