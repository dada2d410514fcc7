"""Fences confine an action's processes: cores, memory, number of processes.

One kind is chosen at start: control groups v2, v1, or (if neither is writable) pinning and rlimits.
Where nothing else tells to which action a process belongs, a reaper is the action's nearest
subreaper. A daemon cannot leave it, and it kills everything below it when the supervisor dies.
"""

import contextlib
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Mapping
from enum import Enum
from typing import NoReturn, Protocol

from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.launch import (
    ChildPipes,
    Launch,
    LaunchedProcess,
    ProcessExit,
    close_all_but,
    confine_and_exec,
    open_pipes,
    read_status,
    receive_fds,
    start,
)
from slackwater.sandbox.limits import Limits

_STARTED = struct.Struct("<i")
_ANSWER_WITHIN_S = 20.0
_SUPERVISOR_GONE = signal.SIGUSR1


def start_below_reaper(launch: Launch) -> LaunchedProcess:
    """As `launch.start`, below a reaper; the child's `reaper` is the reaper's pid."""
    parent_pipes, child_pipes = open_pipes()
    status_read, status_write = os.pipe2(os.O_CLOEXEC)
    parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    supervisor = os.getpid()
    reaper = os.fork()
    if reaper == 0:
        _run_reaper(launch, child_pipes, status_write, child_end, supervisor)
    child_end.close()
    child_pipes.close()
    os.close(status_write)
    parent_end.settimeout(_ANSWER_WITHIN_S)
    try:
        message, descriptors = receive_fds(parent_end, _STARTED.size)
        if not descriptors:
            raise UnavailableError("the started process has ended")
        pid, pidfd = _STARTED.unpack(message)[0], descriptors[0]
        if why := read_status(status_read):
            os.close(pidfd)
            raise RefusedError(why.decode(errors="replace"))
    except (OSError, UnavailableError, RefusedError) as error:
        parent_pipes.close()
        _end_reaper(reaper, parent_end)
        if isinstance(error, RefusedError):
            raise
        raise UnavailableError(f"no process can be started: {error}") from None
    finally:
        os.close(status_read)
    process_tree.helpers.add(reaper)
    child = parent_pipes.child(
        pid, lambda _: _wait_for_exit(pid, reaper, parent_end), time.monotonic(), pidfd
    )
    child.reaper = reaper
    return child


def end_below(reaper: int) -> None:
    """SIGKILL everything below it."""

    def find_alive() -> list[int]:
        below = (pid for pid in process_tree.subtree(reaper) if pid != reaper)
        return [pid for pid in below if process_tree.is_alive(pid)]

    process_tree.kill_until_gone(find_alive)


def _wait_for_exit(pid: int, reaper: int, parent_end: socket.socket) -> ProcessExit:
    """How the action ended; ends its reaper."""
    try:
        return ProcessExit.receive(parent_end, pid)
    finally:
        _end_reaper(reaper, parent_end)


def _end_reaper(reaper: int, parent_end: socket.socket) -> None:
    parent_end.close()
    end_below(reaper)
    process_tree.kill_and_reap(reaper)


def _run_reaper(
    launch: Launch, pipes: ChildPipes, status_write: int, child_end: socket.socket, supervisor: int
) -> NoReturn:
    """The reaper itself, from its fork to its end."""
    try:
        awaited = {signal.SIGCHLD, _SUPERVISOR_GONE}
        signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        linux.adopt_orphans()
        linux.die_with_parent(_SUPERVISOR_GONE)
        if os.getppid() != supervisor:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            confine_and_exec(launch, pipes, status_write)
        socket.send_fds(child_end, [_STARTED.pack(pid)], [os.pidfd_open(pid)])
        close_all_but(child_end.fileno())
        while signal.sigwaitinfo(awaited).si_signo == signal.SIGCHLD:
            _reap_all(pid, child_end)
        end_below(os.getpid())
    finally:
        os._exit(0)


def _reap_all(action_pid: int, child_end: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid == action_pid:
                ended = ProcessExit(status, used.ru_utime, used.ru_stime, used.ru_maxrss)
                child_end.sendall(ended.pack())


class Precedence(Enum):
    """CPU precedence of an action against all other processes, where the kernel supports it."""

    EQUAL = "equal"
    LOW = "low"
    LAST = "last"  # a core that it runs on counts as idle


class Fence(Protocol):
    """Confines one action."""

    def rlimits(self, limits: Limits) -> Mapping[int, int]:
        """Additional rlimits of its processes."""

    def start(self, launch: Launch, limits: Limits) -> LaunchedProcess:
        """Start a process inside, with these cores and limits."""

    def set_precedence(self, precedence: Precedence) -> None:
        """Set the precedence, where that is possible; every start begins with EQUAL."""

    def kill_all(self) -> None:
        """Kill all processes inside."""

    def cpu_s(self) -> float:
        """CPU time used inside so far; 0 if it is not counted."""

    def memory_kills(self) -> int:
        """How often the kernel has killed a process inside for lack of memory."""


class Fences(Protocol):
    """Creates fences of one kind and reuses them."""

    name: str
    enforces_cores: bool  # whether a process cannot widen its own core mask

    def acquire(self, environment: str, user: int | None, cores: frozenset[int]) -> Fence:
        """A fence for one action on these cores."""

    def release(self, fence: Fence) -> None:
        """Return an empty fence."""

    def close(self) -> None:
        """Remove everything."""


class PinnedFence:
    """Pinning and rlimits. User, pid namespace or reaper identify members, never their claims."""

    def __init__(self, environment: str, user: int | None, live: "set[PinnedFence]") -> None:
        self._environment = environment
        self._user = user
        self._live = live
        self._child: LaunchedProcess | None = None

    def rlimits(self, limits: Limits) -> Mapping[int, int]:
        # The kernel counts all threads of a user, so the rest of ours come on top.
        unrelated = 0 if self._user is not None else _count_threads(os.getuid())
        return {
            resource.RLIMIT_AS: limits.memory_bytes,
            resource.RLIMIT_NPROC: limits.processes + unrelated,
        }

    def start(self, launch: Launch, limits: Limits) -> LaunchedProcess:
        # Hazard: bwrap, killed while it sets up its namespaces, leaves a process that waits for it.
        self._child = start_below_reaper(launch) if launch.user is None else start(launch)
        self._live.add(self)
        return self._child

    def set_precedence(self, precedence: Precedence) -> None:
        """Needs a control group."""

    def kill_all(self) -> None:
        """An environment's actions share a user: only the last one kills all that the user runs."""
        child = self._child
        if child is None:
            return
        if not process_tree.is_alive(child.pid):
            self._live.discard(self)
        for pid in process_tree.subtree(child.pid):
            process_tree.kill(pid)
        if child.reaper is not None:
            end_below(child.reaper)
        elif self._user is not None and self._is_last():
            process_tree.kill_all_of_user(self._user)
        self._kill_strays()

    def _is_last(self) -> bool:
        return not any(
            fence._environment == self._environment for fence in self._live if fence is not self
        )

    def _kill_strays(self) -> None:
        """Kill orphans that this process inherited because their reaper was killed."""
        known = process_tree.helpers | {
            fence._child.pid for fence in (*self._live, self) if fence._child is not None
        }
        for pid in set(process_tree.children(os.getpid())) - known:
            for stray in process_tree.subtree(pid):
                process_tree.kill(stray)

    def cpu_s(self) -> float:
        return 0.0

    def memory_kills(self) -> int:
        return 0


class PinnedFences:
    """Fences where no control group is writable."""

    name = "pinning"
    enforces_cores = False

    def __init__(self) -> None:
        self._live: set[PinnedFence] = set()

    def acquire(self, environment: str, user: int | None, cores: frozenset[int]) -> Fence:
        return PinnedFence(environment, user, self._live)

    def release(self, fence: Fence) -> None:
        assert isinstance(fence, PinnedFence)
        self._live.discard(fence)

    def close(self) -> None:
        """Nothing to remove."""


def _count_threads(user: int) -> int:
    """Threads of all processes of a user, also outside of this supervisor."""
    count = 0
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                try:
                    if entry.stat().st_uid == user:
                        count += len(os.listdir(f"{entry.path}/task"))
                except OSError:
                    continue
    return count
