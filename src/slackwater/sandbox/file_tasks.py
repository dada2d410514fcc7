"""The tasks of file workers; each may be killed at any point."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from slackwater.model.errors import RefusedError
from slackwater.sandbox import linux
from slackwater.sandbox.limits import CopyLimits
from slackwater.sandbox.tree_copy import TreeCopier
from slackwater.sandbox.trees import delete_tree, disk_bytes, give_tree, open_folder

# Arguments and results cross a pipe: numbers, text, bytes, None, and lists and dicts of them.
Arguments: TypeAlias = Mapping[str, Any]


def furnish(
    root: str, snapshot: str | None, overlay: bool, user: int | None, files: Mapping[str, bytes]
) -> None:
    """Fill an environment's folders: the view out of a snapshot, if any, then its owner's files."""
    view = f"{root}/view"
    if snapshot is not None and overlay:
        lay_over(snapshot, root, user)
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


def lay_over(below: str, root: str, user: int | None) -> None:
    """Mount `root/view` with a snapshot below and `root/upper` on top."""
    for name in ("view", "upper", "shadow"):
        os.makedirs(f"{root}/{name}", 0o700, exist_ok=True)  # noqa: PTH103
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
    "furnish": furnish,
    "keep_snapshot": keep_snapshot,
    "give": give,
    "delete": delete,
    "measure": disk_bytes,
}
