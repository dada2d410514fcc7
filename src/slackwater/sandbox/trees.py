"""Work on folders with hostile content: delete, change owner, measure.

Every step opens one name below an open folder and follows no link, so nothing outside the tree is
reached, even while it changes. Nothing recurses and no path is joined: depth, length and number of
names cost only time, which the caller bounds.
"""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from slackwater.model.errors import RefusedError
from slackwater.sandbox import process_tree

DEPTH_MOST = 512  # of what is walked; deleting has no bound
NAME_BYTES = 4096  # what a name is charged at least, so that empty files are not free
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAPPED = re.compile(
    r"(?P<begin>\w+)-(?P<end>\w+) \S+ \w+ (?P<major>\w+):(?P<minor>\w+) (?P<number>\d+)"
    r" +(?P<path>/.*) \(deleted\)$"
)
_IN_MEMORY = ("/memfd:", "/dev/zero", "/SYSV", "/dev/shm/", "/anon_hugepage")


class TooDeepError(RefusedError):
    """Folders are nested deeper than is walked."""


def open_folder(name: str, *, dir_fd: int | None = None) -> int:
    """Open a folder without following links; the caller closes it."""
    return os.open(name, _FOLDER, dir_fd=dir_fd)


@dataclass(slots=True)
class FolderLevel:
    """A folder on the way down, and what of it is left to look at."""

    fd: int
    entries: "Iterator[os.DirEntry[str]]"


def walk(top: int) -> "Iterator[tuple[int, os.DirEntry[str]]]":
    """Every name below an open folder with its parent, folders first; skips what is gone.

    TooDeepError below `DEPTH_MOST`.
    """
    levels = [FolderLevel(os.dup(top), os.scandir(top))]
    try:
        while levels:
            level = levels[-1]
            entry = next(level.entries, None)
            if entry is None:
                os.close(levels.pop().fd)
                continue
            yield level.fd, entry
            if not entry.is_dir(follow_symlinks=False):
                continue
            if len(levels) >= DEPTH_MOST:
                raise TooDeepError(f"folders are nested deeper than {DEPTH_MOST}")
            with contextlib.suppress(OSError):
                inner = open_folder(entry.name, dir_fd=level.fd)
                levels.append(FolderLevel(inner, os.scandir(inner)))
    finally:
        for level in levels:
            os.close(level.fd)


def delete_tree(parent: int, name: str) -> None:
    """Remove a folder; subfolders move to the top before they are emptied, so depth is harmless."""
    try:
        top = open_folder(name, dir_fd=parent)
    except NotADirectoryError:
        os.unlink(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    mark, moved = secrets.token_hex(8), 0
    try:
        while folders := _unlink_files(top):
            for folder in folders:
                inner = _open_writable(folder, top)
                try:
                    for each in _unlink_files(inner):
                        moved += 1
                        _make_writable(each, inner)
                        os.rename(each, f".{mark}-{moved}", src_dir_fd=inner, dst_dir_fd=top)
                finally:
                    os.close(inner)
                os.rmdir(folder, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)


def _unlink_files(folder: int) -> list[str]:
    """Remove everything but folders; returns their names."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return folders


def _open_writable(name: str, parent: int) -> int:
    _make_writable(name, parent)
    return open_folder(name, dir_fd=parent)


def _make_writable(name: str, parent: int) -> None:
    """Make a folder writable for its owner, to empty or move it; root needs nothing."""
    mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    if os.geteuid() == 0 or mode & 0o700 == 0o700:
        return
    held = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{held}", 0o700)
    finally:
        os.close(held)


def give_tree(top: int, user: int) -> None:
    """Make a folder and everything in it a user's own."""
    os.chown(top, user, user)
    for folder, entry in walk(top):
        with contextlib.suppress(FileNotFoundError):
            os.chown(entry.name, user, user, dir_fd=folder, follow_symlinks=False)


def tree_bytes(top: int, enough: int) -> int:
    """Blocks on disk below, at least one per name; hard links count once; stops past `enough`."""
    total = 0
    linked: set[tuple[int, int]] = set()
    for _, entry in walk(top):
        with contextlib.suppress(OSError):
            found = entry.stat(follow_symlinks=False)
            total += NAME_BYTES
            if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
                if (found.st_dev, found.st_ino) in linked:
                    continue
                linked.add((found.st_dev, found.st_ino))
            total += max(found.st_blocks * 512 - NAME_BYTES, 0)
        if total > enough:
            break
    return total


def disk_bytes(
    folders: Sequence[str], *, view: str, user: int | None, first: Sequence[int], enough: int
) -> int:
    """Bytes on disk of `folders`; stops counting past `enough`.

    Its processes are those of `user` or, without one, those below the processes `first`.
    """
    total = 0
    # An overlay's files may have its number, or that of the disk below.
    devices = {os.lstat(view).st_dev}
    for folder in folders:
        try:
            top = open_folder(folder)
        except FileNotFoundError:
            continue
        try:
            devices.add(os.fstat(top).st_dev)
            total += tree_bytes(top, enough - total)
        finally:
            os.close(top)
        if total > enough:
            return total
    seen: set[tuple[int, int]] = set()
    for pid in _processes(user, first):
        for device, number, size in _deleted_files(pid):
            if device in devices and (device, number) not in seen:
                seen.add((device, number))
                total += size
        if total > enough:
            break
    return total


def _processes(user: int | None, first: Sequence[int]) -> Iterable[int]:
    """The numbers of an environment's processes."""
    if user is not None:
        return process_tree.pids_of_users(range(user, user + 1))
    return {pid for top in first for pid in process_tree.subtree(top)}


def _deleted_files(pid: int) -> Iterator[tuple[int, int, int]]:
    """Device, number and bytes of the deleted files that a process has."""
    for place in (f"/proc/{pid}/fd", f"/proc/{pid}/map_files"):
        try:
            entries = os.scandir(place)
        except OSError:  # it has gone; maps are root's to look at
            continue
        with entries, contextlib.suppress(OSError):
            for entry in entries:
                with contextlib.suppress(OSError):
                    found = os.stat(entry.path)
                    if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                        yield found.st_dev, found.st_ino, found.st_blocks * 512
    if os.geteuid() != 0:
        yield from _mapped_files(pid)


def _mapped_files(pid: int) -> Iterator[tuple[int, int, int]]:
    """Deleted files by as much as is mapped of them: only root may ask for their blocks."""
    mapped: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as lines:
        for line in lines:
            found = _MAPPED.match(line)
            if found is not None and not found["path"].startswith(_IN_MEMORY):
                device = os.makedev(int(found["major"], 16), int(found["minor"], 16))
                key = device, int(found["number"])
                length = int(found["end"], 16) - int(found["begin"], 16)
                mapped[key] = mapped.get(key, 0) + length
    for (device, number), length in mapped.items():
        yield device, number, length
