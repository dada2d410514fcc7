"""Namespaces that are created once per environment and entered by each of its actions.

Creating mounts takes milliseconds, entering them microseconds. A mount namespace lives while a
descriptor of it is open; a pid namespace needs a process inside. All of this needs root.
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
# It echoes, which shows that it runs, and ends with the writer of its input.
_HOLDER_COMMAND = "/bin/cat"


def _read(descriptor: int) -> bytes:
    """The next bytes; empty at EOF or on a timeout."""
    if not select.select([descriptor], [], [], _READY_WITHIN_S)[0]:
        return b""
    return os.read(descriptor, 4096)


class _PidfdProcess:
    """A child by pidfd: when we kill it, it may be reaped already and its pid reused."""

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
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED)
        os.close(self._descriptor)


class MountNamespace:
    """Mounts that need no process, requested at once and awaited on first entry."""

    def __init__(self, mounts: Mounts, maker: MountMaker) -> None:
        self._mounts = mounts
        self._maker = maker
        self._request = maker.request(mounts)
        self._open: dict[int, int] = {}

    def enter(self) -> Mapping[int, int]:
        """Descriptors by kind; waits until they are there."""
        if not self._open:
            try:
                self._open = {linux.CLONE_NEWNS: self._maker.wait_for(self._request)}
            except UnavailableError:  # the maker may have been killed
                self._request = self._maker.request(self._mounts)
                self._open = {linux.CLONE_NEWNS: self._maker.wait_for(self._request)}
        return self._open

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._maker.release(self._request)


@dataclass(slots=True)
class _StartupPipes:
    """What a bwrap reports while it starts: its first process, that it is `ready`, its `errors`."""

    info: int
    ready: int
    errors: int

    def close(self) -> None:
        for descriptor in (self.info, self.ready, self.errors):
            os.close(descriptor)


class BubblewrapNamespaces:
    """All namespaces of one bubblewrap, kept alive by a process inside; awaited on first entry.

    `argv` is bwrap with options, `owner` the environments' folder. The namespaces end with the
    supervisor: bwrap dies with its parent, and the process inside reads EOF. If bwrap was still
    setting up, `kill_leftover_holders` cleans up.
    """

    def __init__(self, argv: Sequence[str], owner: str) -> None:
        self._open: dict[int, int] = {}
        self._holder: _PidfdProcess | None = None
        stdin, self._keepalive = os.pipe2(os.O_CLOEXEC)
        info, info_out = os.pipe2(os.O_CLOEXEC)
        ready, ready_out = os.pipe2(os.O_CLOEXEC)
        errors, errors_out = os.pipe2(os.O_CLOEXEC)
        self._starting: _StartupPipes | None = _StartupPipes(info, ready, errors)
        try:
            pid = os.posix_spawn(
                argv[0],
                [*argv, "--info-fd", "3", "--", _HOLDER_COMMAND],
                {**LAUNCHER_VARIABLES, _HOLDER: owner},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, stdin, 0),
                    (os.POSIX_SPAWN_DUP2, ready_out, 1),
                    (os.POSIX_SPAWN_DUP2, errors_out, 2),
                    (os.POSIX_SPAWN_DUP2, info_out, 3),
                ],
                setsid=True,
            )
        except OSError as error:
            self._starting.close()
            os.close(self._keepalive)
            raise UnavailableError(f"no process can be started: {error.strerror}") from None
        finally:
            for descriptor in (stdin, info_out, ready_out, errors_out):
                os.close(descriptor)
        self._bwrap = _PidfdProcess(pid)
        process_tree.helpers.add(pid)
        os.write(self._keepalive, b"\n")

    def enter(self) -> Mapping[int, int]:
        """Descriptors by kind; waits until they are there."""
        if self._starting is not None:
            starting, self._starting = self._starting, None
            try:
                if _read(starting.ready) != b"\n":
                    why = _read(starting.errors).decode(errors="replace").strip()
                    raise UnavailableError(f"bwrap does not start: {why}")
                self._holder = _PidfdProcess(_read_child_pid(starting.info))
                self._open = {k: linux.open_namespace(k, self._holder.pid) for k in _KINDS}
            finally:
                starting.close()
        return self._open

    @property
    def readiness(self) -> int | None:
        """A descriptor that is readable once `enter` does not block; None: it does not now."""
        if self._starting is None or select.select([self._starting.ready], [], [], 0)[0]:
            return None
        return self._starting.ready

    @property
    def is_lost(self) -> bool:
        """Whether bwrap was killed, and the namespaces with it."""
        return self._starting is None and self._bwrap.has_ended

    def close(self) -> None:
        """Kill the processes; `reap` waits for their end.

        The process inside is killed first: bwrap's death during setup would leave it behind.
        """
        if self._starting is not None:
            with contextlib.suppress(UnavailableError):
                self._holder = _PidfdProcess(_read_child_pid(self._starting.info))
            self._starting.close()
        for descriptor in (*self._open.values(), self._keepalive):
            os.close(descriptor)
        for process in self._processes():
            process.kill()
        process_tree.helpers.discard(self._bwrap.pid)

    @property
    def has_ended(self) -> bool:
        return all(process.has_ended for process in self._processes())

    def reap(self) -> None:
        """Wait for the end of the processes, after `close`."""
        for process in self._processes():
            process.reap()

    def _processes(self) -> list[_PidfdProcess]:
        return [self._bwrap] if self._holder is None else [self._holder, self._bwrap]


def _read_child_pid(info: int) -> int:
    """The pid in bwrap's report; waits until bwrap has created the process."""
    report = b""
    while not report.rstrip().endswith(b"}") and (more := _read(info)):
        report += more
    try:
        return int(json.loads(report)["child-pid"])
    except (ValueError, KeyError):
        raise UnavailableError("bwrap has created no process") from None


def kill_leftover_holders(owner: str) -> None:
    """As root, kill holders that a killed supervisor of this folder left behind.

    They run as root, so an action, which has another user, cannot impersonate one.
    """
    for pid in process_tree.pids_of_users(range(1)):
        if process_tree.variables(pid).get(_HOLDER) == owner:
            process_tree.kill(pid)
