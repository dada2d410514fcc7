"""Work on folders with hostile content: delete, change owner, measure.

Every step opens one name below an open folder and follows no link, so nothing outside the tree is
reached, even while the tree changes. Nothing recurses and no paths are joined: depth, length and
number of names cost only time, which the caller bounds.
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

MAX_DEPTH = 512  # of `walk`; deletion has no bound
NAME_BYTES = 4096  # the minimum charge for a name, so that empty files are not free
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAPPED_FILE = re.compile(
    r"(?P<begin>\w+)-(?P<end>\w+) \S+ \w+ (?P<major>\w+):(?P<minor>\w+) (?P<number>\d+)"
    r" +(?P<path>/.*) \(deleted\)$"
)
_MEMORY_PATHS = ("/memfd:", "/dev/zero", "/SYSV", "/dev/shm/", "/anon_hugepage")


class TooDeepError(RefusedError):
    """Folders are nested deeper than `MAX_DEPTH`."""


def open_folder(name: str, *, dir_fd: int | None = None) -> int:
    """Open a folder without following links; the caller closes it."""
    return os.open(name, _FOLDER, dir_fd=dir_fd)


@contextlib.contextmanager
def use_folder(name: str, *, dir_fd: int | None = None) -> Iterator[int]:
    """Open a folder, as `open_folder`, inside the context."""
    descriptor = open_folder(name, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class FolderLevel:
    """An open folder during a walk, and its remaining entries."""

    fd: int
    entries: "Iterator[os.DirEntry[str]]"


def walk(top: int) -> "Iterator[tuple[int, os.DirEntry[str]]]":
    """Every name below an open folder with its parent, folders first; skips vanished ones.

    TooDeepError below `MAX_DEPTH`.
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
            if len(levels) >= MAX_DEPTH:
                raise TooDeepError(f"folders are nested deeper than {MAX_DEPTH}")
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
    token, count = secrets.token_hex(8), 0
    try:
        while folders := _unlink_files(top):
            for folder in folders:
                _make_writable(folder, top)
                with use_folder(folder, dir_fd=top) as inner:
                    for inner_name in _unlink_files(inner):
                        count += 1
                        _make_writable(inner_name, inner)
                        os.rename(inner_name, f".{token}-{count}", src_dir_fd=inner, dst_dir_fd=top)
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


def _make_writable(name: str, parent: int) -> None:
    """Make a folder writable for its owner, to empty or move it; root needs no change."""
    mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    if os.geteuid() == 0 or mode & 0o700 == 0o700:
        return
    descriptor = os.open(
        name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
    )
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
    finally:
        os.close(descriptor)


def chown_tree(top: int, user: int) -> None:
    os.chown(top, user, user)
    for folder, entry in walk(top):
        with contextlib.suppress(FileNotFoundError):
            os.chown(entry.name, user, user, dir_fd=folder, follow_symlinks=False)


def tree_bytes(top: int, stop_above: int) -> int:
    """Bytes on disk below, one block per name or more; hard links count once."""
    total = 0
    linked: set[tuple[int, int]] = set()
    for _, entry in walk(top):
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            total += NAME_BYTES
            if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                if (status.st_dev, status.st_ino) in linked:
                    continue
                linked.add((status.st_dev, status.st_ino))
            total += max(status.st_blocks * 512 - NAME_BYTES, 0)
        if total > stop_above:
            break
    return total


def disk_bytes(
    folders: Sequence[str], *, view: str, user: int | None, top_pids: Sequence[int], stop_above: int
) -> int:
    """Bytes on disk of `folders`; stops counting past `stop_above`.

    Its processes are those of `user` or, without one, those below the processes `top_pids`.
    """
    total = 0
    # An overlay's files may report its own device number, or that of the disk below.
    devices = {os.lstat(view).st_dev}
    for folder in folders:
        try:
            top = open_folder(folder)
        except FileNotFoundError:
            continue
        try:
            devices.add(os.fstat(top).st_dev)
            total += tree_bytes(top, stop_above - total)
        finally:
            os.close(top)
        if total > stop_above:
            return total
    seen: set[tuple[int, int]] = set()
    for pid in _find_pids(user, top_pids):
        for device, number, size in _find_deleted_files(pid):
            if device in devices and (device, number) not in seen:
                seen.add((device, number))
                total += size
        if total > stop_above:
            break
    return total


def _find_pids(user: int | None, top_pids: Sequence[int]) -> Iterable[int]:
    """Pids of an environment's processes."""
    if user is not None:
        return process_tree.pids_of_users(range(user, user + 1))
    return {pid for top in top_pids for pid in process_tree.subtree(top)}


def _find_deleted_files(pid: int) -> Iterator[tuple[int, int, int]]:
    """Device, inode and bytes of the deleted files that a process has open or mapped."""
    for folder in (f"/proc/{pid}/fd", f"/proc/{pid}/map_files"):
        try:
            entries = os.scandir(folder)
        except OSError:  # the process has ended; map_files needs root
            continue
        with entries, contextlib.suppress(OSError):
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = os.stat(entry.path)
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        yield status.st_dev, status.st_ino, status.st_blocks * 512
    if os.geteuid() != 0:
        yield from _find_mapped_files(pid)


def _find_mapped_files(pid: int) -> Iterator[tuple[int, int, int]]:
    """Deleted files, by the mapped length: only root can read their blocks."""
    mapped: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as lines:
        for line in lines:
            match = _MAPPED_FILE.match(line)
            if match is not None and not match["path"].startswith(_MEMORY_PATHS):
                device = os.makedev(int(match["major"], 16), int(match["minor"], 16))
                key = device, int(match["number"])
                length = int(match["end"], 16) - int(match["begin"], 16)
                mapped[key] = mapped.get(key, 0) + length
    for (device, number), length in mapped.items():
        yield device, number, length
