"""The mounts that a plain process of root's sees: temporary folders of its own, and nobody else's."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slackwater.sandbox import linux

SHARED_TMP = ("/tmp", "/var/tmp", "/dev/shm")
# What is written to a cover stays in memory, on the account of some action, for as long as the environment lives.
_COVER = "size=64k"


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A folder that another user can read but not reach: `barrier` is the folder above it that bars the way."""

    barrier: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class Mounts:
    """`own_tmp` lies over the machine's temporary folders; `folder` and the `shown` ones can be reached."""

    folder: Path
    own_tmp: Path
    shown: Sequence[Uncovered] = ()

    def make(self) -> None:
        """In a process that may have mounts of its own, and from then on does.

        Folders go out of sight on the way, so they are opened first and mounted by descriptor. What covers a folder
        that must be seen again is always fresh: in a folder of the action's own it could have left a link for this
        to follow.
        """
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
        with contextlib.ExitStack() as opened:
            self._mount(opened)

    def _mount(self, opened: contextlib.ExitStack) -> None:
        folders = (self.folder, *(one.folder for one in self.shown))
        needed = {path: _opened(path, opened) for path in folders}
        covered = {one.barrier for one in self.shown}
        for barrier in covered:
            linux.mount("none", str(barrier), "tmpfs", linux.MS_NOSUID, f"mode=755,{_COVER}")
        tmp = _opened(self.own_tmp, opened)
        for shared in SHARED_TMP:
            if any(path.is_relative_to(shared) for path in needed):
                linux.mount("none", shared, "tmpfs", linux.MS_NOSUID, f"mode=1777,{_COVER}")
                covered.add(Path(shared))
            elif os.path.isdir(shared):  # noqa: PTH112
                linux.mount(f"/proc/self/fd/{tmp}", shared, flags=linux.MS_BIND)
        for path, descriptor in needed.items():
            if any(path.is_relative_to(cover) for cover in covered):
                path.mkdir(parents=True, exist_ok=True)
                linux.mount(f"/proc/self/fd/{descriptor}", str(path), flags=linux.MS_BIND)


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
