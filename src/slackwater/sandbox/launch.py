"""Starts one process with its limits already applied.

Everything between fork and exec happens in the child, and failures come back through a pipe that a
successful exec closes: a started process is known to be confined. The forking process must have one
thread.
"""

import array
import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.sandbox import linux
from slackwater.sandbox.system_calls import filter_program

_MOST = 16
_BEYOND_FIXED = 64  # below this, descriptors of a program that is started have fixed numbers
_BYTES = array.array("i").itemsize
_SECOND = struct.Struct("<7si")
_SECOND_MARK = b"second\0"
_SAID_WITHIN_S = 20.0
_ANY_DESCRIPTOR = 1 << 30
FIRST_INPUT = 3  # after input, output and errors
# All that a launcher outside a sandbox is told: with an action's own variables and folder it would
# load libraries of the action's.
LAUNCHER_VARIABLES = {"PATH": "/usr/bin:/bin"}
LAUNCHER_FOLDER = "/"


def received(ends: socket.socket, length: int) -> tuple[bytes, list[int]]:
    """Bytes and close-on-exec descriptors, which `socket.recv_fds` cannot request."""
    room = socket.CMSG_SPACE(_MOST * _BYTES)
    body, beside, _, _ = ends.recvmsg(length, room, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, data in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _BYTES])
    return body, found.tolist()


def whole(ends: socket.socket, length: int) -> bytes:
    """Receive exactly `length` bytes; UnavailableError if the peer exits before."""
    body = bytearray(length)
    left = memoryview(body)
    while left:
        count = ends.recv_into(left)
        if not count:
            raise UnavailableError("the process at the other end has gone")
        left = left[count:]
    return bytes(body)


def moved_up(descriptor: int) -> int:
    """Close it, and have it under a number that no program's fixed descriptors take."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _BEYOND_FIXED)
    finally:
        os.close(descriptor)


def readable(content: bytes) -> int:
    """A descriptor from which exactly this can be read; it has no name."""
    made = os.memfd_create("input", os.MFD_CLOEXEC)
    with os.fdopen(made, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(made, 0, os.SEEK_SET)
    return moved_up(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run and how to confine it.

    The child takes `cores` and becomes `user` (root only). As root it may get its own network and
    enter held namespaces, given as descriptors by kind (`linux.CLONE_NEWNS` and others). `inputs`
    are readable from descriptors 3, 4 and so on. If `filtered`, it has no capabilities and cannot
    make the calls that `system_calls` refuses.
    """

    argv: Sequence[str]
    variables: Mapping[str, str]
    folder: str
    user: int | None = None
    cores: frozenset[int] = frozenset()
    rlimits: Mapping[int, int] = field(default_factory=dict)
    own_network: bool = False
    enter: Mapping[int, int] = field(default_factory=dict)
    inputs: tuple[bytes, ...] = ()
    filtered: bool = False


class ProcessExit(NamedTuple):
    """How a process ended, and its usage."""

    status: int
    user_s: float
    system_s: float
    max_rss_kib: int

    @classmethod
    def reaped(cls, pid: int) -> "ProcessExit":
        """Reap our own child; if somebody else reaped it, nothing more is known."""
        try:
            _, status, used = os.wait4(pid, 0)
        except ChildProcessError:
            return cls(signal.SIGKILL, 0.0, 0.0, 0)
        return cls(status, used.ru_utime, used.ru_stime, used.ru_maxrss)


@dataclass(slots=True)
class LaunchedProcess:
    """A started process, running since `began_s` (monotonic); its parent reports its end."""

    pid: int
    pidfd: int
    stdin: int
    stdout: int
    stderr: int
    reaped: Callable[[int], ProcessExit]
    began_s: float
    reaper: int | None = None  # the process that all of its processes are below, if there is one

    def reap(self) -> ProcessExit:
        """Once, when it has ended."""
        return self.reaped(self.pid)

    def kill(self) -> None:
        """SIGKILL by pidfd, so that a reused pid is safe."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close_stdin(self) -> None:
        """Close its input, once only: the number may be reused."""
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def close(self) -> None:
        self.close_stdin()
        for descriptor in (self.pidfd, self.stdout, self.stderr):
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ChildPipes:
    """The child's ends of the pipes."""

    stdin: int
    stdout: int
    stderr: int

    def close(self) -> None:
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.close(descriptor)


class ParentPipes(ChildPipes):
    """The starter's ends of the pipes; none of them blocks."""

    def child(
        self, pid: int, reaped: Callable[[int], ProcessExit], began_s: float, pidfd: int
    ) -> LaunchedProcess:
        return LaunchedProcess(pid, pidfd, self.stdin, self.stdout, self.stderr, reaped, began_s)


def make_pipes() -> tuple[ParentPipes, ChildPipes]:
    """Three pipes; UnavailableError if there are no descriptors left."""
    made: list[int] = []
    try:
        for _ in range(3):
            made += os.pipe2(os.O_CLOEXEC)
    except OSError as error:
        for descriptor in made:
            os.close(descriptor)
        raise UnavailableError(f"no process can be started: {error.strerror}") from None
    in_read, in_write, out_read, out_write, err_read, err_write = made
    for descriptor in (in_write, out_read, err_read):
        os.set_blocking(descriptor, False)
    return ParentPipes(in_write, out_read, err_read), ChildPipes(in_read, out_write, err_write)


def start(launch: Launch) -> LaunchedProcess:
    """Fork, confine, exec; returns when the program runs, RefusedError says why it does not."""
    own, others = make_pipes()
    heard, said = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
        if pid == 0:
            become(launch, others, said)
        os.close(said)
        said = -1
        if linux.CLONE_NEWPID in launch.enter:
            pid = _pid_of_second(heard)
        why = heard_from(heard)
        if why:
            os.waitpid(pid, 0)
            raise RefusedError(why.decode(errors="replace"))
        return own.child(pid, ProcessExit.reaped, time.monotonic(), os.pidfd_open(pid))
    except (UnavailableError, RefusedError):
        own.close()
        raise
    except OSError as error:
        own.close()
        raise UnavailableError(f"no process can be started: {error.strerror}") from None
    finally:
        others.close()
        os.close(heard)
        if said >= 0:
            os.close(said)


def heard_from(descriptor: int, most: int = 4096) -> bytes:
    if not select.select([descriptor], [], [], _SAID_WITHIN_S)[0]:
        raise UnavailableError("a process that was started does not say what became of it")
    return os.read(descriptor, most)


def _pid_of_second(heard: int) -> int:
    """The pid of the process made inside a pid namespace.

    Reads no further: the reason for a failure may follow in the pipe.
    """
    said = heard_from(heard, _SECOND.size)
    if len(said) == _SECOND.size and said.startswith(_SECOND_MARK):
        return int(_SECOND.unpack(said)[1])
    if said:
        said += heard_from(heard)
    raise UnavailableError(said.decode(errors="replace") or "a process that was started has gone")


def become(launch: Launch, ends: ChildPipes, said: int) -> NoReturn:
    """In a fresh child: confine it and run the program, or say why not."""
    try:
        if linux.CLONE_NEWPID in launch.enter:
            _go_on_inside(launch.enter[linux.CLONE_NEWPID], said)
        os.setsid()
        os.umask(0o022)
        linux.give_way(0, os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for target, source in enumerate((ends.stdin, ends.stdout, ends.stderr)):
            os.dup2(source, target)
        said = moved_up(said)
        for target, content in enumerate(launch.inputs, FIRST_INPUT):
            os.dup2(readable(content), target)
        if launch.own_network:
            have_own_network()
        if linux.CLONE_NEWNS in launch.enter:
            linux.unshare(linux.CLONE_NEWIPC)
        _confine(launch)
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if launch.filtered:
            linux.filter_calls(filter_program())
        close_all_but(said, FIRST_INPUT + len(launch.inputs))  # which the program's start closes
        os.execvpe(launch.argv[0], list(launch.argv), dict(launch.variables))
    except BaseException as error:  # noqa: BLE001  (this process must end here, whatever went wrong)
        os.write(said, str(error).encode()[:4000])
    finally:
        os._exit(127)


def fork_helper(
    live: Callable[[socket.socket], None], within_s: float
) -> tuple[int, socket.socket]:
    """Fork a process that runs `live` and ends; its pid and our end of the sockets between us.

    It has nothing else of ours open, and leaves the end of the service to us.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        try:
            close_all_but(theirs.fileno())
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            os.umask(0o022)
            live(theirs)
        finally:
            os._exit(0)
    theirs.close()
    ours.settimeout(within_s)
    return pid, ours


def close_all_but(descriptor: int, first: int = FIRST_INPUT) -> None:
    """Close all inherited descriptors from `first` on, except this one."""
    os.closerange(first, descriptor)
    os.closerange(descriptor + 1, _ANY_DESCRIPTOR)


def _go_on_inside(processes: int, said: int) -> None:
    """Enter a pid namespace: only a process forked afterwards is in it; tell its pid and exit."""
    linux.enter(processes, linux.CLONE_NEWPID)
    pid = linux.fork_sibling()
    if pid > 0:
        os.write(said, _SECOND.pack(_SECOND_MARK, pid))
        os._exit(0)
    linux.die_with_parent(signal.SIGKILL)


def have_own_network() -> None:
    """No way out, but a loopback."""
    linux.unshare(linux.CLONE_NEWNET)
    linux.loopback_up()


def _confine(launch: Launch) -> None:
    if launch.cores:
        os.sched_setaffinity(0, launch.cores)
    for kind, descriptor in launch.enter.items():
        if kind != linux.CLONE_NEWPID:
            linux.enter(descriptor, kind)
    os.chdir(launch.folder)
    for limit, most in launch.rlimits.items():
        resource.setrlimit(limit, (most, most))
    if launch.filtered and os.getuid() == 0:
        linux.drop_capabilities()
    if launch.user is not None:
        os.setgroups([])
        os.setresgid(launch.user, launch.user, launch.user)
        os.setresuid(launch.user, launch.user, launch.user)
    linux.gain_no_privileges()
    linux.die_with_parent(signal.SIGKILL)


def can_have_namespaces() -> bool:
    """Whether children can get networks and mounts of their own; not as root in a container."""
    pid = os.fork()
    if pid == 0:
        try:
            linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
            linux.loopback_up()
            linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return status == 0
