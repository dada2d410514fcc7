"""Mounts of a plain process as root: private temporary folders."""

import contextlib
import gc
import marshal
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slackwater.model.errors import UnavailableError
from slackwater.sandbox import linux
from slackwater.sandbox.launch import HelperProcess, receive_exactly, receive_fds

SHARED_TMP = ("/tmp", "/var/tmp", "/dev/shm")
# A cover's content stays in memory for the life of the environment, charged to some action, so its
# size is small.
COVER_BYTES = 65536
_COVER = f"size={COVER_BYTES}"
_ORDER = struct.Struct("<cii")  # kind, request number, length of the body
_ANSWER = struct.Struct("<ii")  # request number, length of the error
_CREATE, _RELEASE = b"m", b"f"
_ANSWER_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class UnreachableFolder:
    """A folder that other users could read but cannot reach, because of `barrier` above it."""

    barrier: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class Mounts:
    """`own_tmp` covers the machine's temporary folders; `folder` and `visible` stay reachable."""

    folder: str
    own_tmp: str
    visible: Sequence[UnreachableFolder] = ()

    @property
    def tmp(self) -> str:
        """Where the action finds its own temporary files."""
        return pick_tmp(self._needed)

    @property
    def _needed(self) -> tuple[str, ...]:
        return (self.folder, *(str(each.folder) for each in self.visible))

    def create(self) -> None:
        """Make the mounts in this process, which then has its own mount namespace.

        Covers hide folders, so needed folders are opened first and mounted by descriptor. A cover
        over a needed folder is always fresh: in its own folder an action could have left a symlink.
        """
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
        with contextlib.ExitStack() as stack:
            self._mount(stack)

    def _mount(self, stack: contextlib.ExitStack) -> None:
        needed = {path: _open_folder(path, stack) for path in self._needed}
        covered = {str(each.barrier) for each in self.visible} - set(SHARED_TMP)
        for barrier in covered:
            linux.mount("none", barrier, "tmpfs", linux.MS_NOSUID, f"mode=755,{_COVER}")
        tmp = _open_folder(self.own_tmp, stack)
        for shared in SHARED_TMP:
            if contains_any(shared, needed):
                linux.mount("none", shared, "tmpfs", linux.MS_NOSUID, f"mode=1777,{_COVER}")
                covered.add(shared)
            elif os.path.isdir(shared):
                linux.mount(f"/proc/self/fd/{tmp}", shared, flags=linux.MS_BIND)
        for path, descriptor in needed.items():
            if any(contains_any(cover, [path]) for cover in covered):
                os.makedirs(path, exist_ok=True)
                linux.mount(f"/proc/self/fd/{descriptor}", path, flags=linux.MS_BIND)


def contains_any(shared: str, folders: Iterable[Path | str]) -> bool:
    """Whether this temporary folder contains one of the folders, and so needs a fresh cover."""
    return any(f"{folder}/".startswith(f"{shared.rstrip('/')}/") for folder in folders)


def pick_tmp(folders: Iterable[Path | str]) -> str:
    """The action's own temporary folder: the first that contains none of the folders."""
    needed = tuple(folders)
    return next(
        (shared for shared in SHARED_TMP if not contains_any(shared, needed)), SHARED_TMP[0]
    )


def _open_folder(path: str, stack: contextlib.ExitStack) -> int:
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def find_barrier(folder: Path) -> Path | None:
    """The highest parent that other users cannot traverse; None if they can reach the folder."""
    for above in reversed(folder.resolve().parents):
        if not above.stat().st_mode & 0o001:
            return above
    return None


class MountMaker:
    """The supervisor's end; the process starts on first use, and again if it was killed."""

    def __init__(self) -> None:
        self._process: HelperProcess | None = None
        self._number = 0
        self._pending: set[int] = set()
        self._ready: dict[int, int] = {}
        self._failed: dict[int, str] = {}

    def request(self, mounts: Mounts) -> int:
        """Request mounts; returns the number for `wait_for`."""
        self._number += 1
        visible = [(str(each.barrier), str(each.folder)) for each in mounts.visible]
        body = marshal.dumps((mounts.folder, mounts.own_tmp, visible))
        order = _ORDER.pack(_CREATE, self._number, len(body)) + body
        try:
            self._ensure_running().sendall(order)
        except OSError:
            self.close()
            self._ensure_running().sendall(order)
        self._pending.add(self._number)
        with contextlib.suppress(UnavailableError):  # `wait_for` raises it again
            while select.select([self._ensure_running()], [], [], 0)[0]:
                self._receive_answer()
        return self._number

    def wait_for(self, number: int) -> int:
        """A descriptor of the mounts, which the caller then owns; waits until they exist."""
        while number in self._pending:
            self._receive_answer()
        if number in self._ready:
            return self._ready.pop(number)
        why = self._failed.pop(number, "the process that creates them has ended")
        raise UnavailableError(f"mounts cannot be created: {why}")

    def release(self, number: int) -> None:
        """Drop mounts; callers close their descriptor first."""
        self._pending.discard(number)
        self._failed.pop(number, None)
        if number in self._ready:
            os.close(self._ready.pop(number))
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.socket.sendall(_ORDER.pack(_RELEASE, number, 0))

    def close(self) -> None:
        """End the process; mounts live while open elsewhere."""
        self._pending.clear()
        if self._process is not None:
            self._process.close()
            self._process = None

    def _ensure_running(self) -> socket.socket:
        if self._process is None:
            self._process = HelperProcess(_run_maker, _ANSWER_WITHIN_S)
        return self._process.socket

    def _receive_answer(self) -> None:
        connection = self._ensure_running()
        try:
            head, descriptors = receive_fds(connection, _ANSWER.size)
            head += receive_exactly(connection, _ANSWER.size - len(head))
            number, length = _ANSWER.unpack(head)
            why = receive_exactly(connection, length).decode(errors="replace")
        except (OSError, UnavailableError) as error:
            self.close()
            raise UnavailableError(f"mounts cannot be created: {error}") from None
        if number not in self._pending:
            for descriptor in descriptors:
                os.close(descriptor)
            return
        self._pending.discard(number)
        if descriptors:
            self._ready[number] = descriptors[0]
        else:
            self._failed[number] = why


def _run_maker(connection: socket.socket) -> None:
    """The process itself, until the supervisor's end is closed."""
    linux.die_with_parent(signal.SIGKILL)
    gc.disable()  # a collection would touch, and so copy, every page
    sys.path.clear()  # hazard: an import would load code from the environment's mounts
    home = linux.open_namespace(linux.CLONE_NEWNS)
    namespaces: dict[int, int] = {}
    while True:
        kind, number, length = _ORDER.unpack(receive_exactly(connection, _ORDER.size))
        body = receive_exactly(connection, length)
        if kind == _CREATE:
            _create(connection, number, body, namespaces)
            linux.join_namespace(home, linux.CLONE_NEWNS)
        elif number in namespaces:
            os.close(namespaces.pop(number))


def _create(
    connection: socket.socket, number: int, body: bytes, namespaces: dict[int, int]
) -> None:
    folder, own_tmp, visible = marshal.loads(body)
    visible_folders = tuple(
        UnreachableFolder(Path(barrier), Path(path)) for barrier, path in visible
    )
    try:
        Mounts(folder, own_tmp, visible_folders).create()
        namespaces[number] = linux.open_namespace(linux.CLONE_NEWNS)
        socket.send_fds(connection, [_ANSWER.pack(number, 0)], [namespaces[number]])
    except OSError as error:
        why = str(error).encode()[:4000]
        connection.sendall(_ANSWER.pack(number, len(why)) + why)
