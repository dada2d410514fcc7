"""Starts one process with its limits already applied.

Everything between fork and exec happens in the child, which reports a failure through a pipe that a
successful exec closes: a process counts as started only once it is confined. The forking process
must have one thread.
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
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.system_calls import filter_program
from slackwater.wire.framed_socket import receive_into

_MAX_DESCRIPTORS = 16
_BEYOND_FIXED = 64  # below this, descriptors of a program that is started have fixed numbers
_BYTES = array.array("i").itemsize
_SECOND = struct.Struct("<7si")
_EXIT = struct.Struct("<iddq")
_SECOND_MARK = b"second\0"
_STATUS_WITHIN_S = 20.0
_ANY_DESCRIPTOR = 1 << 30
FIRST_INPUT = 3  # after input, output and errors
# The whole environment of a launcher outside a sandbox. Hazard: with an action's own variables and
# folder, the launcher would load the action's libraries (LD_PRELOAD).
LAUNCHER_VARIABLES = {"PATH": "/usr/bin:/bin"}
LAUNCHER_FOLDER = "/"


def receive_fds(connection: socket.socket, length: int) -> tuple[bytes, list[int]]:
    """Bytes and close-on-exec descriptors, which `socket.recv_fds` cannot request."""
    ancillary_bytes = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _BYTES)
    body, ancillary, _, _ = connection.recvmsg(length, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % _BYTES])
    return body, descriptors.tolist()


def receive_exactly(connection: socket.socket, length: int) -> bytes:
    """Receive exactly `length` bytes; UnavailableError if the peer exits before."""
    body = bytearray(length)
    receive_into(connection, memoryview(body))
    return bytes(body)


def move_up(descriptor: int) -> int:
    """Move a descriptor to a number above the fixed descriptors of a started program."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _BEYOND_FIXED)
    finally:
        os.close(descriptor)


def memory_file(content: bytes) -> int:
    """A descriptor of an anonymous file with this content."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return move_up(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run and how to confine it.

    The child is pinned to `cores` and becomes `user` (root only). As root it may get its own
    network and enter existing namespaces, given as descriptors by kind (`linux.CLONE_NEWNS` and
    others). `inputs` are readable from descriptors 3, 4 and so on. If `filtered`, it has no
    capabilities and cannot make the calls that `system_calls` refuses.
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
    def reap(cls, pid: int) -> "ProcessExit":
        """Wait for our own child; if it was reaped elsewhere, its status is unknown."""
        try:
            _, status, used = os.wait4(pid, 0)
        except ChildProcessError:
            return cls(signal.SIGKILL, 0.0, 0.0, 0)
        return cls(status, used.ru_utime, used.ru_stime, used.ru_maxrss)

    def pack(self) -> bytes:
        """The report for `receive`."""
        return _EXIT.pack(*self)

    @classmethod
    def receive(cls, parent: socket.socket, pid: int) -> "ProcessExit":
        """The report of a process's parent. If that has died, the process is our own child now."""
        try:
            return cls(*_EXIT.unpack(receive_exactly(parent, _EXIT.size)))
        except (OSError, UnavailableError):
            return cls.reap(pid)


@dataclass(slots=True)
class LaunchedProcess:
    """A process that runs since `began_s` (monotonic); its parent supplies `wait_for_exit`."""

    pid: int
    pidfd: int
    stdin: int
    stdout: int
    stderr: int
    wait_for_exit: Callable[[int], ProcessExit]
    began_s: float
    reaper: int | None = None  # the subreaper above all of its processes, if there is one

    def reap(self) -> ProcessExit:
        """Collect its exit status; call once, after it has ended."""
        return self.wait_for_exit(self.pid)

    def kill(self) -> None:
        """SIGKILL by pidfd, so that a reused pid is safe."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close_stdin(self) -> None:
        """Close its input; at most once, since the number may be reused."""
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
    """The parent's ends of the pipes; non-blocking."""

    def child(
        self, pid: int, wait_for_exit: Callable[[int], ProcessExit], began_s: float, pidfd: int
    ) -> LaunchedProcess:
        return LaunchedProcess(
            pid, pidfd, self.stdin, self.stdout, self.stderr, wait_for_exit, began_s
        )


def open_pipes() -> tuple[ParentPipes, ChildPipes]:
    """Three pipes; UnavailableError if there are no descriptors left."""
    descriptors: list[int] = []
    try:
        for _ in range(3):
            descriptors += os.pipe2(os.O_CLOEXEC)
    except OSError as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise UnavailableError(f"no process can be started: {error.strerror}") from None
    in_read, in_write, out_read, out_write, err_read, err_write = descriptors
    for descriptor in (in_write, out_read, err_read):
        os.set_blocking(descriptor, False)
    return ParentPipes(in_write, out_read, err_read), ChildPipes(in_read, out_write, err_write)


def start(launch: Launch) -> LaunchedProcess:
    """Fork, confine, exec; returns when the program runs, RefusedError says why it does not."""
    parent_pipes, child_pipes = open_pipes()
    status_read, status_write = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
        if pid == 0:
            confine_and_exec(launch, child_pipes, status_write)
        os.close(status_write)
        status_write = -1
        if linux.CLONE_NEWPID in launch.enter:
            pid = _read_second_pid(status_read)
        why = read_status(status_read)
        if why:
            os.waitpid(pid, 0)
            raise RefusedError(why.decode(errors="replace"))
        return parent_pipes.child(pid, ProcessExit.reap, time.monotonic(), os.pidfd_open(pid))
    except (UnavailableError, RefusedError):
        parent_pipes.close()
        raise
    except OSError as error:
        parent_pipes.close()
        raise UnavailableError(f"no process can be started: {error.strerror}") from None
    finally:
        child_pipes.close()
        os.close(status_read)
        if status_write >= 0:
            os.close(status_write)


def read_status(descriptor: int, max_bytes: int = 4096) -> bytes:
    """A child's report from its status pipe; empty if it executed its program."""
    if not select.select([descriptor], [], [], _STATUS_WITHIN_S)[0]:
        raise UnavailableError("the started process does not report its status")
    return os.read(descriptor, max_bytes)


def _read_second_pid(status_read: int) -> int:
    """The pid of the process that was forked inside a pid namespace.

    Reads no further, since the reason for a failure may follow in the pipe.
    """
    status = read_status(status_read, _SECOND.size)
    if len(status) == _SECOND.size and status.startswith(_SECOND_MARK):
        return int(_SECOND.unpack(status)[1])
    if status:
        status += read_status(status_read)
    raise UnavailableError(status.decode(errors="replace") or "the started process has ended")


def confine_and_exec(launch: Launch, pipes: ChildPipes, status_write: int) -> NoReturn:
    """In a forked child: confine it and execute the program, or report why that failed."""
    try:
        if linux.CLONE_NEWPID in launch.enter:
            _continue_in_pid_namespace(launch.enter[linux.CLONE_NEWPID], status_write)
        os.setsid()
        os.umask(0o022)
        linux.lower_priority(0, os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for target, source in enumerate((pipes.stdin, pipes.stdout, pipes.stderr)):
            os.dup2(source, target)
        status_write = move_up(status_write)
        for target, content in enumerate(launch.inputs, FIRST_INPUT):
            os.dup2(memory_file(content), target)
        if launch.own_network:
            unshare_network()
        if linux.CLONE_NEWNS in launch.enter:
            linux.unshare(linux.CLONE_NEWIPC)
        _confine(launch)
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if launch.filtered:
            linux.filter_calls(filter_program())
        close_all_but(status_write, FIRST_INPUT + len(launch.inputs))  # exec closes `status_write`
        os.execvpe(launch.argv[0], list(launch.argv), dict(launch.variables))
    except BaseException as error:  # noqa: BLE001  (this process must end here, whatever went wrong)
        os.write(status_write, str(error).encode()[:4000])
    finally:
        os._exit(127)


class HelperProcess:
    """A forked process that executes `run` and exits, and our end of a socket pair to it.

    It inherits no other descriptor and ignores SIGTERM and SIGINT: it ends with this process.
    """

    def __init__(self, run: Callable[[socket.socket], None], within_s: float) -> None:
        self.socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with child_end:
            try:
                self.pid = os.fork()
            except OSError:
                self.socket.close()
                raise
            if self.pid == 0:
                _run_helper(run, child_end)
        self.socket.settimeout(within_s)
        process_tree.helpers.add(self.pid)

    @property
    def has_ended(self) -> bool:
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return status is not None

    def close(self) -> None:
        self.socket.close()
        process_tree.kill_and_reap(self.pid)


def _run_helper(run: Callable[[socket.socket], None], child_end: socket.socket) -> NoReturn:
    try:
        close_all_but(child_end.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        os.umask(0o022)
        run(child_end)
    finally:
        os._exit(0)


def close_all_but(descriptor: int, first: int = FIRST_INPUT) -> None:
    """Close all inherited descriptors from `first` on, except this one."""
    os.closerange(first, descriptor)
    os.closerange(descriptor + 1, _ANY_DESCRIPTOR)


def _continue_in_pid_namespace(processes: int, status_write: int) -> None:
    """Enter a pid namespace: only a process forked afterwards is in it. Report its pid and exit."""
    linux.join_namespace(processes, linux.CLONE_NEWPID)
    pid = linux.fork_sibling()
    if pid > 0:
        os.write(status_write, _SECOND.pack(_SECOND_MARK, pid))
        os._exit(0)
    linux.die_with_parent(signal.SIGKILL)


def unshare_network() -> None:
    """Enter a new network namespace, which has only a loopback."""
    linux.unshare(linux.CLONE_NEWNET)
    linux.bring_loopback_up()


def _confine(launch: Launch) -> None:
    if launch.cores:
        os.sched_setaffinity(0, launch.cores)
    for kind, descriptor in launch.enter.items():
        if kind != linux.CLONE_NEWPID:
            linux.join_namespace(descriptor, kind)
    os.chdir(launch.folder)
    for limit, value in launch.rlimits.items():
        resource.setrlimit(limit, (value, value))
    if launch.filtered and os.getuid() == 0:
        linux.drop_capabilities()
    if launch.user is not None:
        os.setgroups([])
        os.setresgid(launch.user, launch.user, launch.user)
        os.setresuid(launch.user, launch.user, launch.user)
    linux.gain_no_privileges()
    linux.die_with_parent(signal.SIGKILL)


def can_create_namespaces() -> bool:
    """Whether children can get their own networks and mounts; root in most containers cannot."""
    pid = os.fork()
    if pid == 0:
        try:
            linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
            linux.bring_loopback_up()
            linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return status == 0
