"""The tasks of file workers; each may be killed at any point."""

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from slackwater.model.errors import RefusedError
from slackwater.sandbox import linux
from slackwater.sandbox.limits import CopyLimits
from slackwater.sandbox.trees import (
    DEPTH_MOST,
    NAME_BYTES,
    FolderLevel,
    delete_tree,
    disk_bytes,
    give_tree,
    open_folder,
)

# Arguments and results cross a pipe: numbers, text, bytes, None, and lists and dicts of them.
Arguments: TypeAlias = Mapping[str, Any]

_PIECE_BYTES = 1 << 24
_NO_COPY_RANGE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@dataclass(slots=True)
class CopyBudget:
    """A copy's usage against its limits."""

    limits: CopyLimits
    names: int = 0
    disk_bytes: int = 0
    apparent_bytes: int = 0

    def charge(self, found: os.stat_result) -> None:
        """Count one name; RefusedError if that is too much."""
        self.names += 1
        self.disk_bytes += max(found.st_blocks * 512, NAME_BYTES)
        if stat.S_ISREG(found.st_mode):
            self.apparent_bytes += found.st_size
        for what in ("names", "disk_bytes", "apparent_bytes"):
            most = getattr(self.limits, what)
            if getattr(self, what) > most:
                raise RefusedError(f"it has more than {most} {what.replace('_', ' ')}")


@dataclass(slots=True)
class _Pair:
    """A folder that is copied, and its copy."""

    source: FolderLevel
    target: int
    mode: int


@dataclass(frozen=True, slots=True)
class TreeCopier:
    """Copies files, folders and links, owned by `user`; `for_all` makes them writable to all."""

    limits: CopyLimits
    user: int | None = None
    for_all: bool = False

    def copy(self, source: str, target: str) -> int:
        """Make the folder `target` out of the folder `source`; its bytes on disk."""
        budget = CopyBudget(self.limits)
        os.mkdir(target, 0o700)
        first = open_folder(source)
        pairs = [
            _Pair(
                FolderLevel(first, os.scandir(first)), open_folder(target), os.fstat(first).st_mode
            )
        ]
        try:
            while pairs:
                pair = pairs[-1]
                entry = next(pair.source.entries, None)
                if entry is None:
                    self._finish_folder(pairs.pop())
                elif (inner := self._copy_entry(pair, entry, budget)) is not None:
                    if len(pairs) >= DEPTH_MOST:
                        raise RefusedError(f"its folders are nested deeper than {DEPTH_MOST}")
                    pairs.append(inner)
        finally:
            for pair in pairs:
                os.close(pair.source.fd)
                os.close(pair.target)
        return budget.disk_bytes

    def _finish_folder(self, pair: _Pair) -> None:
        """Set permissions last: a folder may be closed to its writers."""
        os.fchmod(pair.target, pair.mode & 0o777 | (0o777 if self.for_all else 0o700))
        if self.user is not None:
            os.chown(pair.target, self.user, self.user)
        os.close(pair.source.fd)
        os.close(pair.target)

    def _copy_entry(
        self, pair: _Pair, entry: "os.DirEntry[str]", budget: CopyBudget
    ) -> _Pair | None:
        """Copy one name; returns the pair of a folder to descend into."""
        name, into = entry.name, pair.target
        try:
            found = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None  # whoever runs there has removed it
        if stat.S_ISLNK(found.st_mode):
            budget.charge(found)
            os.symlink(os.readlink(name, dir_fd=pair.source.fd), name, dir_fd=into)
            if self.user is not None:
                os.chown(name, self.user, self.user, dir_fd=into, follow_symlinks=False)
        elif stat.S_ISDIR(found.st_mode):
            budget.charge(found)
            inner = open_folder(name, dir_fd=pair.source.fd)
            os.mkdir(name, 0o700, dir_fd=into)
            return _Pair(
                FolderLevel(inner, os.scandir(inner)), open_folder(name, dir_fd=into), found.st_mode
            )
        elif stat.S_ISREG(found.st_mode):
            self._copy_file(pair, name, budget)
        return None  # sockets and pipes have no content

    def _copy_file(self, pair: _Pair, name: str, budget: CopyBudget) -> None:
        # It may have become a pipe meanwhile, which a plain open would wait for.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        old = os.open(name, flags, dir_fd=pair.source.fd)
        try:
            found = os.fstat(old)
            if not stat.S_ISREG(found.st_mode):
                return
            budget.charge(found)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            new = os.open(name, flags, 0o600, dir_fd=pair.target)
            try:
                copy_content(old, new, found.st_size)
                os.fchmod(new, found.st_mode & 0o777 | (0o666 if self.for_all else 0o600))
                if self.user is not None:
                    os.chown(new, self.user, self.user)
            finally:
                os.close(new)
        finally:
            os.close(old)


def copy_content(old: int, new: int, size: int) -> None:
    """Copy the first `size` bytes; keeps holes, ignores later growth."""
    try:
        linux.clone_file(old, new)
        return
    except OSError:
        os.ftruncate(new, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(old, at, os.SEEK_DATA)
            end = min(os.lseek(old, at, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # a hole to the end
            raise
        while at < end:
            copied = _copy_piece(old, new, at, min(end - at, _PIECE_BYTES))
            if copied == 0:
                return  # it was cut short meanwhile
            at += copied


def _copy_piece(old: int, new: int, at: int, length: int) -> int:
    try:
        return os.copy_file_range(old, new, length, at, at)
    except OSError as error:
        if error.errno not in _NO_COPY_RANGE:
            raise
    os.lseek(new, at, os.SEEK_SET)
    return os.sendfile(new, old, at, length)


def populate(
    root: str, snapshot: str | None, overlay: bool, user: int | None, files: Mapping[str, bytes]
) -> None:
    """Fill an environment's folders: the view out of a snapshot, if any, then its owner's files."""
    view = f"{root}/view"
    if snapshot is not None and overlay:
        mount_overlay(snapshot, root, user)
    elif snapshot is not None:
        TreeCopier(CopyLimits(), user=user).copy(snapshot, view)
    top = open_folder(view)
    try:
        for name, content in files.items():
            _put(top, name, content, user)
        if user is not None:
            os.chown(top, user, user)
    finally:
        os.close(top)


def mount_overlay(below: str, root: str, user: int | None) -> None:
    """Mount `root/view` with a snapshot below and `root/upper` on top."""
    for name in ("view", "upper", "shadow"):
        os.makedirs(f"{root}/{name}", 0o700, exist_ok=True)
    if user is not None:
        os.chown(f"{root}/upper", user, user)
    # By descriptor: a name may have what separates options, or layers.
    held = [open_folder(folder) for folder in (below, f"{root}/upper", f"{root}/shadow")]
    try:
        lower, upper, work = (f"/proc/self/fd/{each}" for each in held)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        flags = linux.MS_NOSUID | linux.MS_NODEV
        linux.mount("overlay", f"{root}/view", "overlay", flags, options)
    finally:
        for each in held:
            os.close(each)


def _put(top: int, name: str, content: bytes, user: int | None) -> None:
    """Write one file of the owner's, where nothing has run yet or all is a snapshot's."""
    *folders, last = (part for part in name.split("/") if part not in ("", "."))
    at = os.dup(top)
    try:
        for folder in folders:
            at, above = _enter(at, folder, user), at
            os.close(above)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(last, flags, 0o644, dir_fd=at), "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o777 | 0o644)
            if user is not None:
                os.chown(file.fileno(), user, user)
    except OSError as error:
        raise RefusedError(f"files: {name[:100]!r} cannot be written: {error.strerror}") from None
    finally:
        os.close(at)


def _enter(at: int, folder: str, user: int | None) -> int:
    """A folder below an open one, made if it is not there; a link is refused."""
    try:
        os.mkdir(folder, 0o755, dir_fd=at)
    except FileExistsError:
        return open_folder(folder, dir_fd=at)
    inner = open_folder(folder, dir_fd=at)
    if user is not None:
        os.chown(inner, user, user)
    return inner


def keep_snapshot(view: str, partial: str, most_bytes: int | None) -> int:
    """Copy a view for others to begin from; its bytes on disk."""
    limits = CopyLimits()
    if most_bytes is not None:
        limits = replace(limits, disk_bytes=min(limits.disk_bytes, most_bytes))
    return TreeCopier(limits, for_all=True).copy(view, partial)


def give(folders: Sequence[str], user: int) -> None:
    """Make folders that an earlier supervisor left a user's own."""
    for folder in folders:
        top = open_folder(folder)
        try:
            give_tree(top, user)
        finally:
            os.close(top)


def delete(parent: str, name: str) -> None:
    """Remove a folder, whatever is in it."""
    top = open_folder(parent)
    try:
        delete_tree(top, name)
    finally:
        os.close(top)


TASKS: Mapping[str, Callable[..., object]] = {
    "populate": populate,
    "keep_snapshot": keep_snapshot,
    "give": give,
    "delete": delete,
    "measure": disk_bytes,
}
