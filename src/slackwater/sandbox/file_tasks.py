"""The tasks of file workers. Each may be killed at any point."""

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
    MAX_DEPTH,
    NAME_BYTES,
    FolderLevel,
    chown_tree,
    delete_tree,
    disk_bytes,
    open_folder,
    use_folder,
)

# Arguments and results cross a pipe: numbers, text, bytes, None, and lists and dicts of them.
Arguments: TypeAlias = Mapping[str, Any]

_PIECE_BYTES = 1 << 24
_COPY_RANGE_UNSUPPORTED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@dataclass(slots=True)
class CopyBudget:
    """A copy's usage against its limits."""

    limits: CopyLimits
    names: int = 0
    disk_bytes: int = 0
    apparent_bytes: int = 0

    def charge(self, status: os.stat_result) -> None:
        """Count one name; RefusedError if a limit is exceeded."""
        self.names += 1
        self.disk_bytes += max(status.st_blocks * 512, NAME_BYTES)
        if stat.S_ISREG(status.st_mode):
            self.apparent_bytes += status.st_size
        for quantity in ("names", "disk_bytes", "apparent_bytes"):
            limit = getattr(self.limits, quantity)
            if getattr(self, quantity) > limit:
                raise RefusedError(f"it has more than {limit} {quantity.replace('_', ' ')}")


@dataclass(slots=True)
class _FolderPair:
    """A folder during the copy, and its copy."""

    source: FolderLevel
    target: int
    mode: int


@dataclass(frozen=True, slots=True)
class TreeCopier:
    """Copies files, folders and links for `user`; `for_all` makes the copy writable to all."""

    limits: CopyLimits
    user: int | None = None
    for_all: bool = False

    def copy(self, source: str, target: str) -> int:
        """Copy the folder `source` to the new folder `target`; the copy's bytes on disk."""
        budget = CopyBudget(self.limits)
        os.mkdir(target, 0o700)
        top = open_folder(source)
        pairs = [
            _FolderPair(
                FolderLevel(top, os.scandir(top)), open_folder(target), os.fstat(top).st_mode
            )
        ]
        try:
            while pairs:
                pair = pairs[-1]
                entry = next(pair.source.entries, None)
                if entry is None:
                    self._finish_folder(pairs.pop())
                elif (inner := self._copy_entry(pair, entry, budget)) is not None:
                    if len(pairs) >= MAX_DEPTH:
                        raise RefusedError(f"its folders are nested deeper than {MAX_DEPTH}")
                    pairs.append(inner)
        finally:
            for pair in pairs:
                os.close(pair.source.fd)
                os.close(pair.target)
        return budget.disk_bytes

    def _finish_folder(self, pair: _FolderPair) -> None:
        """Set permissions last: a folder may be read-only even for its owner."""
        os.fchmod(pair.target, pair.mode & 0o777 | (0o777 if self.for_all else 0o700))
        if self.user is not None:
            os.chown(pair.target, self.user, self.user)
        os.close(pair.source.fd)
        os.close(pair.target)

    def _copy_entry(
        self, pair: _FolderPair, entry: "os.DirEntry[str]", budget: CopyBudget
    ) -> _FolderPair | None:
        """Copy one name; returns the pair of a folder to descend into."""
        name, target = entry.name, pair.target
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None  # an action has removed it meanwhile
        if stat.S_ISLNK(status.st_mode):
            budget.charge(status)
            os.symlink(os.readlink(name, dir_fd=pair.source.fd), name, dir_fd=target)
            if self.user is not None:
                os.chown(name, self.user, self.user, dir_fd=target, follow_symlinks=False)
        elif stat.S_ISDIR(status.st_mode):
            budget.charge(status)
            inner = open_folder(name, dir_fd=pair.source.fd)
            os.mkdir(name, 0o700, dir_fd=target)
            return _FolderPair(
                FolderLevel(inner, os.scandir(inner)),
                open_folder(name, dir_fd=target),
                status.st_mode,
            )
        elif stat.S_ISREG(status.st_mode):
            self._copy_file(pair, name, budget)
        return None  # sockets and pipes have no content

    def _copy_file(self, pair: _FolderPair, name: str, budget: CopyBudget) -> None:
        # Hazard: it may have become a pipe meanwhile, and opening one without O_NONBLOCK blocks.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        source = os.open(name, flags, dir_fd=pair.source.fd)
        try:
            status = os.fstat(source)
            if not stat.S_ISREG(status.st_mode):
                return
            budget.charge(status)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            target = os.open(name, flags, 0o600, dir_fd=pair.target)
            try:
                copy_content(source, target, status.st_size)
                os.fchmod(target, status.st_mode & 0o777 | (0o666 if self.for_all else 0o600))
                if self.user is not None:
                    os.chown(target, self.user, self.user)
            finally:
                os.close(target)
        finally:
            os.close(source)


def copy_content(source: int, target: int, size: int) -> None:
    """Copy the first `size` bytes; keeps holes, ignores later growth."""
    try:
        linux.clone_file(source, target)
        return
    except OSError:
        os.ftruncate(target, size)
    offset = 0
    while offset < size:
        try:
            offset = os.lseek(source, offset, os.SEEK_DATA)
            end = min(os.lseek(source, offset, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # a hole to the end
            raise
        while offset < end:
            copied = _copy_piece(source, target, offset, min(end - offset, _PIECE_BYTES))
            if copied == 0:
                return  # it was cut short meanwhile
            offset += copied


def _copy_piece(source: int, target: int, offset: int, length: int) -> int:
    try:
        return os.copy_file_range(source, target, length, offset, offset)
    except OSError as error:
        if error.errno not in _COPY_RANGE_UNSUPPORTED:
            raise
    os.lseek(target, offset, os.SEEK_SET)
    return os.sendfile(target, source, offset, length)


def populate(
    root: str, snapshot: str | None, overlay: bool, user: int | None, files: Mapping[str, bytes]
) -> None:
    """Fill an environment's view from a snapshot, if there is one, then add its owner's files."""
    view = f"{root}/view"
    if snapshot is not None and overlay:
        mount_overlay(snapshot, root, user)
    elif snapshot is not None:
        TreeCopier(CopyLimits(), user=user).copy(snapshot, view)
    with use_folder(view) as top:
        for name, content in files.items():
            _write_file(top, name, content, user)
        if user is not None:
            os.chown(top, user, user)


def mount_overlay(lower_folder: str, root: str, user: int | None) -> None:
    """Mount `root/view` with a snapshot below and `root/upper` on top."""
    for name in ("view", "upper", "shadow"):
        os.makedirs(f"{root}/{name}", 0o700, exist_ok=True)
    if user is not None:
        os.chown(f"{root}/upper", user, user)
    # By descriptor: a path may contain the characters that separate options, or layers.
    with (
        use_folder(lower_folder) as lower,
        use_folder(f"{root}/upper") as upper,
        use_folder(f"{root}/shadow") as work,
    ):
        layers = {"lowerdir": lower, "upperdir": upper, "workdir": work}
        options = ",".join(f"{name}=/proc/self/fd/{fd}" for name, fd in layers.items())
        flags = linux.MS_NOSUID | linux.MS_NODEV
        linux.mount("overlay", f"{root}/view", "overlay", flags, options)


def _write_file(top: int, name: str, content: bytes, user: int | None) -> None:
    """Write one of the owner's files into a view that no action has used yet."""
    *folders, file_name = (part for part in name.split("/") if part not in ("", "."))
    parent_fd = os.dup(top)
    try:
        for folder in folders:
            parent_fd, left_fd = _open_or_create(parent_fd, folder, user), parent_fd
            os.close(left_fd)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(file_name, flags, 0o644, dir_fd=parent_fd), "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o777 | 0o644)
            if user is not None:
                os.chown(file.fileno(), user, user)
    except OSError as error:
        raise RefusedError(f"files: {name[:100]!r} cannot be written: {error.strerror}") from None
    finally:
        os.close(parent_fd)


def _open_or_create(parent_fd: int, folder: str, user: int | None) -> int:
    """Open a folder below an open one, creating it if it is missing; refuses links."""
    try:
        os.mkdir(folder, 0o755, dir_fd=parent_fd)
    except FileExistsError:
        return open_folder(folder, dir_fd=parent_fd)
    inner = open_folder(folder, dir_fd=parent_fd)
    if user is not None:
        os.chown(inner, user, user)
    return inner


def copy_snapshot(view: str, partial: str, max_bytes: int | None) -> int:
    """Copy a view, as a snapshot for other environments; its bytes on disk."""
    limits = CopyLimits()
    if max_bytes is not None:
        limits = replace(limits, disk_bytes=min(limits.disk_bytes, max_bytes))
    return TreeCopier(limits, for_all=True).copy(view, partial)


def change_owner(folders: Sequence[str], user: int) -> None:
    for folder in folders:
        with use_folder(folder) as top:
            chown_tree(top, user)


def delete(parent: str, name: str) -> None:
    with use_folder(parent) as top:
        delete_tree(top, name)


TASKS: Mapping[str, Callable[..., object]] = {
    "populate": populate,
    "copy_snapshot": copy_snapshot,
    "change_owner": change_owner,
    "delete": delete,
    "measure": disk_bytes,
}
