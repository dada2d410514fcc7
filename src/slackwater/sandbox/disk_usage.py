"""Disk usage of an environment: its folders, and deleted files that its processes hold open.

Deleted files are found by open descriptors and mappings. Files in memory count as memory.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence

from slackwater.sandbox.trees import open_folder, tree_bytes

_MAPPED = re.compile(
    r"(?P<begin>\w+)-(?P<end>\w+) \S+ \w+ (?P<major>\w+):(?P<minor>\w+) (?P<number>\d+)"
    r" +(?P<path>/.*) \(deleted\)$"
)
_IN_MEMORY = ("/memfd:", "/dev/zero", "/SYSV", "/dev/shm/", "/anon_hugepage")


def disk_bytes(
    folders: Sequence[str],
    *,
    view: str,
    user: int | None,
    first: Sequence[int],
    enough: int,
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
    for pid in _processes(user, set(first)):
        for device, number, size in _deleted_files(pid):
            if device in devices and (device, number) not in seen:
                seen.add((device, number))
                total += size
        if total > enough:
            break
    return total


def _processes(user: int | None, first: set[int]) -> Iterable[int]:
    """The numbers of an environment's processes."""
    parents: dict[int, int] = {}
    own = os.getuid() if user is None else user
    with os.scandir("/proc") as entries:
        for entry in entries:
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == own:
                    parents[int(entry.name)] = _parent(int(entry.name))
    if user is not None:
        return parents
    return [pid for pid in parents if _is_below(pid, first, parents)]


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
        return int(file.read(4096).rpartition(b")")[2].split()[1])


def _is_below(pid: int, tops: set[int], parents: dict[int, int]) -> bool:
    passed: set[int] = set()
    while pid in parents and pid not in passed:
        if pid in tops:
            return True
        passed.add(pid)
        pid = parents[pid]
    return pid in tops


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
                    found = os.stat(entry.path)  # noqa: PTH116  (the open file behind the link)
                    if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                        yield found.st_dev, found.st_ino, found.st_blocks * 512
    if os.geteuid() != 0:
        yield from _mapped_files(pid)


def _mapped_files(pid: int) -> Iterator[tuple[int, int, int]]:
    """Deleted files by as much as is mapped of them: only root may ask for their blocks."""
    mapped: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as lines:  # noqa: PTH123
        for line in lines:
            found = _MAPPED.match(line)
            if found is not None and not found["path"].startswith(_IN_MEMORY):
                device = os.makedev(int(found["major"], 16), int(found["minor"], 16))
                key = device, int(found["number"])
                length = int(found["end"], 16) - int(found["begin"], 16)
                mapped[key] = mapped.get(key, 0) + length
    for (device, number), length in mapped.items():
        yield device, number, length
