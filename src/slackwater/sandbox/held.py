"""Namespaces made once per environment and entered by each of its actions.

Making mounts takes milliseconds, entering them microseconds. Mounts live while open; a pid
namespace needs a process that lives in it. All of it needs root.
"""

import contextlib
import json
import os
import select
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slackwater.model.errors import UnavailableError
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.launch import LAUNCHER_VARIABLES
from slackwater.sandbox.mounts import MountMaker, Mounts

_READY_WITHIN_S = 20.0
_HOLDER = "SLACKWATER_HOLDER"
_KINDS = (linux.CLONE_NEWNS, linux.CLONE_NEWPID, linux.CLONE_NEWUTS, linux.CLONE_NEWCGROUP)
# says again what it hears, so it is known to run, and ends with whoever speaks to it
_INSIDE = "/bin/cat"


def _heard(descriptor: int) -> bytes:
    """The next bytes; empty at EOF or on a timeout."""
    if not select.select([descriptor], [], [], _READY_WITHIN_S)[0]:
        return b""
    return os.read(descriptor, 4096)


class _Helper:
    """A child by pidfd: it may be gone and reaped when we end it, and its pid reused."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise UnavailableError("the started process has ended") from None

    @property
    def has_ended(self) -> bool:
        return bool(select.select([self._descriptor], [], [], 0)[0])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for its end."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED)
        os.close(self._descriptor)


class HeldMounts:
    """Mounts without a process, requested at once and awaited on first entry."""

    def __init__(self, mounts: Mounts, maker: MountMaker) -> None:
        self._mounts = mounts
        self._maker = maker
        self._number = maker.ask(mounts)
        self._open: dict[int, int] = {}

    def enter(self) -> Mapping[int, int]:
        """Descriptors by kind; waits until they are there."""
        if not self._open:
            try:
                self._open = {linux.CLONE_NEWNS: self._maker.take(self._number)}
            except UnavailableError:  # somebody may have killed the maker
                self._number = self._maker.ask(self._mounts)
                self._open = {linux.CLONE_NEWNS: self._maker.take(self._number)}
        return self._open

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._maker.forget(self._number)


@dataclass(slots=True)
class _Starting:
    """A starting bwrap; `info` tells the first process inside, `ready` that it is set up."""

    info: int
    ready: int
    errors: int

    def close(self) -> None:
        for descriptor in (self.info, self.ready, self.errors):
            os.close(descriptor)


class HeldSandbox:
    """All namespaces of one bubblewrap, held by a process inside; awaited on first entry.

    `argv` is bwrap with options, `owner` the environments' folder. It ends with the supervisor:
    bwrap dies with its parent, and the process inside reads EOF. If bwrap was still setting up,
    `end_left` ends the rest.
    """

    def __init__(self, argv: Sequence[str], owner: str) -> None:
        self._open: dict[int, int] = {}
        self._first: _Helper | None = None
        held, self._voice = os.pipe2(os.O_CLOEXEC)
        info, info_out = os.pipe2(os.O_CLOEXEC)
        ready, ready_out = os.pipe2(os.O_CLOEXEC)
        errors, errors_out = os.pipe2(os.O_CLOEXEC)
        self._starting: _Starting | None = _Starting(info, ready, errors)
        try:
            pid = os.posix_spawn(
                argv[0],
                [*argv, "--info-fd", "3", "--", _INSIDE],
                {**LAUNCHER_VARIABLES, _HOLDER: owner},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, held, 0),
                    (os.POSIX_SPAWN_DUP2, ready_out, 1),
                    (os.POSIX_SPAWN_DUP2, errors_out, 2),
                    (os.POSIX_SPAWN_DUP2, info_out, 3),
                ],
                setsid=True,
            )
        except OSError as error:
            self._starting.close()
            os.close(self._voice)
            raise UnavailableError(f"no process can be started: {error.strerror}") from None
        finally:
            for descriptor in (held, info_out, ready_out, errors_out):
                os.close(descriptor)
        self._helper = _Helper(pid)
        process_tree.helpers.add(pid)
        os.write(self._voice, b"\n")

    def enter(self) -> Mapping[int, int]:
        """Descriptors by kind; waits until they are there."""
        if self._starting is not None:
            starting, self._starting = self._starting, None
            try:
                if _heard(starting.ready) != b"\n":
                    why = _heard(starting.errors).decode(errors="replace").strip()
                    raise UnavailableError(f"bwrap does not start: {why}")
                self._first = _Helper(_first_inside(starting.info))
                self._open = {k: linux.open_namespace(k, self._first.pid) for k in _KINDS}
            finally:
                starting.close()
        return self._open

    @property
    def readiness(self) -> int | None:
        """Can be read from once `enter` does not wait; None if it would not wait now."""
        if self._starting is None or select.select([self._starting.ready], [], [], 0)[0]:
            return None
        return self._starting.ready

    @property
    def is_lost(self) -> bool:
        """Whether the process that holds it was killed, and its namespaces went with it."""
        return self._starting is None and self._helper.has_ended

    def close(self) -> None:
        """Kill it; `reap` waits for its end. The first process inside goes first: bwrap's death
        during setup would leave it behind.
        """
        if self._starting is not None:
            with contextlib.suppress(UnavailableError):
                self._first = _Helper(_first_inside(self._starting.info))
            self._starting.close()
        for descriptor in (*self._open.values(), self._voice):
            os.close(descriptor)
        for helper in self._helpers():
            helper.kill()
        process_tree.helpers.discard(self._helper.pid)

    @property
    def has_ended(self) -> bool:
        return all(helper.has_ended for helper in self._helpers())

    def reap(self) -> None:
        """Wait for its end, after `close`."""
        for helper in self._helpers():
            helper.reap()

    def _helpers(self) -> list[_Helper]:
        return [self._helper] if self._first is None else [self._first, self._helper]


def _first_inside(info: int) -> int:
    """What bwrap says, as soon as it has made the process."""
    said = b""
    while not said.rstrip().endswith(b"}") and (more := _heard(info)):
        said += more
    try:
        return int(json.loads(said)["child-pid"])
    except (ValueError, KeyError):
        raise UnavailableError("bwrap has made no process") from None


def end_left(owner: str) -> None:
    """As root, kill holders that a killed supervisor of this folder left.

    They are root's own: no action, which has another user, can impersonate one.
    """
    for pid in process_tree.pids_of_users(range(1)):
        if process_tree.variables(pid).get(_HOLDER) == owner:
            process_tree.kill(pid)
