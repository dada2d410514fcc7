"""The mounts of root's plain process: private temporary folders."""

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
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.launch import fork_helper, receive_exactly, receive_with_descriptors

SHARED_TMP = ("/tmp", "/var/tmp", "/dev/shm")
# What is written to a cover stays in memory, on the account of some action, for as long as the
# environment lives.
COVER_BYTES = 65536
_COVER = f"size={COVER_BYTES}"
_ORDER = struct.Struct("<cii")  # what, of which number, length of the rest
_ANSWER = struct.Struct("<ii")  # of which number, length of why not
_MAKE, _FORGET = b"m", b"f"
_ANSWER_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class UnreachableFolder:
    """A folder that other users can read but not reach, because of `barrier` above it."""

    barrier: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class Mounts:
    """`own_tmp` covers the machine's temporary folders; `folder` and `shown` stay reachable."""

    folder: str
    own_tmp: str
    shown: Sequence[UnreachableFolder] = ()

    @property
    def tmp(self) -> str:
        """Where the action finds its own temporary files."""
        return tmp_beside(self._needed)

    @property
    def _needed(self) -> tuple[str, ...]:
        return (self.folder, *(str(one.folder) for one in self.shown))

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
        covered = {str(one.barrier) for one in self.shown} - set(SHARED_TMP)
        for barrier in covered:
            linux.mount("none", barrier, "tmpfs", linux.MS_NOSUID, f"mode=755,{_COVER}")
        tmp = _opened(self.own_tmp, opened)
        for shared in SHARED_TMP:
            if has_any(shared, needed):
                linux.mount("none", shared, "tmpfs", linux.MS_NOSUID, f"mode=1777,{_COVER}")
                covered.add(shared)
            elif os.path.isdir(shared):
                linux.mount(f"/proc/self/fd/{tmp}", shared, flags=linux.MS_BIND)
        for path, descriptor in needed.items():
            if any(has_any(cover, [path]) for cover in covered):
                os.makedirs(path, exist_ok=True)
                linux.mount(f"/proc/self/fd/{descriptor}", path, flags=linux.MS_BIND)


def has_any(shared: str, folders: Iterable[Path | str]) -> bool:
    """Whether this temporary folder holds one of the folders, so that it needs a fresh cover."""
    return any(f"{folder}/".startswith(f"{shared.rstrip('/')}/") for folder in folders)


def tmp_beside(folders: Iterable[Path | str]) -> str:
    """The first temporary folder that holds none of the folders: the action's own."""
    known = tuple(folders)
    return next((shared for shared in SHARED_TMP if not has_any(shared, known)), SHARED_TMP[0])


def _opened(path: str, opened: contextlib.ExitStack) -> int:
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    opened.callback(os.close, descriptor)
    return descriptor


def barrier_of(folder: Path) -> Path | None:
    """The highest folder above that strangers may not pass through; None if they can reach it."""
    for above in reversed(folder.resolve().parents):
        if not above.stat().st_mode & 0o001:
            return above
    return None


class MountMaker:
    """The supervisor's end; the process starts on first use, and again if it was killed."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._pid = -1
        self._number = 0
        self._asked: set[int] = set()
        self._made: dict[int, int] = {}
        self._failed: dict[int, str] = {}

    def ask(self, mounts: Mounts) -> int:
        """Have mounts made; a number by which they can be taken."""
        self._number += 1
        shown = [(str(one.barrier), str(one.folder)) for one in mounts.shown]
        body = marshal.dumps((mounts.folder, mounts.own_tmp, shown))
        order = _ORDER.pack(_MAKE, self._number, len(body)) + body
        try:
            self._running().sendall(order)
        except OSError:
            self.close()
            self._running().sendall(order)
        self._asked.add(self._number)
        with contextlib.suppress(UnavailableError):  # whoever takes them will hear
            while select.select([self._running()], [], [], 0)[0]:
                self._hear()
        return self._number

    def take(self, number: int) -> int:
        """A descriptor of the mounts, the caller's from now on; waits until they are made."""
        while number in self._asked:
            self._hear()
        if number in self._made:
            return self._made.pop(number)
        why = self._failed.pop(number, "who makes them has gone")
        raise UnavailableError(f"no mounts can be made: {why}")

    def forget(self, number: int) -> None:
        """Drop mounts; holders of a descriptor close it first."""
        self._asked.discard(number)
        self._failed.pop(number, None)
        if number in self._made:
            os.close(self._made.pop(number))
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(_ORDER.pack(_FORGET, number, 0))

    def close(self) -> None:
        """End the process; mounts live while open elsewhere."""
        self._asked.clear()
        if self._socket is None:
            return
        self._socket.close()
        self._socket = None
        process_tree.kill_and_reap(self._pid)

    def _running(self) -> socket.socket:
        if self._socket is None:
            self._pid, self._socket = fork_helper(_live, _ANSWER_WITHIN_S)
            process_tree.helpers.add(self._pid)
        return self._socket

    def _hear(self) -> None:
        """Process the next answer."""
        ends = self._running()
        try:
            head, descriptors = receive_with_descriptors(ends, _ANSWER.size)
            head += receive_exactly(ends, _ANSWER.size - len(head))
            number, length = _ANSWER.unpack(head)
            why = receive_exactly(ends, length).decode(errors="replace")
        except (OSError, UnavailableError) as error:
            self.close()
            raise UnavailableError(f"no mounts can be made: {error}") from None
        if number not in self._asked:
            for descriptor in descriptors:
                os.close(descriptor)
            return
        self._asked.discard(number)
        if descriptors:
            self._made[number] = descriptors[0]
        else:
            self._failed[number] = why


def _live(ends: socket.socket) -> None:
    """The process itself, until the supervisor's end is closed."""
    linux.die_with_parent(signal.SIGKILL)
    gc.disable()  # a collection would touch, and so copy, every page
    sys.path.clear()  # in an environment's mounts, nothing may be imported
    home = linux.open_namespace(linux.CLONE_NEWNS)
    held: dict[int, int] = {}
    while True:
        kind, number, length = _ORDER.unpack(receive_exactly(ends, _ORDER.size))
        body = receive_exactly(ends, length)
        if kind == _MAKE:
            _make(ends, number, body, held)
            linux.join_namespace(home, linux.CLONE_NEWNS)
        elif number in held:
            os.close(held.pop(number))


def _make(ends: socket.socket, number: int, body: bytes, held: dict[int, int]) -> None:
    folder, own_tmp, shown = marshal.loads(body)
    uncovered = tuple(UnreachableFolder(Path(barrier), Path(seen)) for barrier, seen in shown)
    try:
        Mounts(folder, own_tmp, uncovered).make()
        held[number] = linux.open_namespace(linux.CLONE_NEWNS)
        socket.send_fds(ends, [_ANSWER.pack(number, 0)], [held[number]])
    except OSError as error:
        why = str(error).encode()[:4000]
        ends.sendall(_ANSWER.pack(number, len(why)) + why)
