"""Fences confine an action's processes: cores, memory, number of processes.

Chosen once at start: control groups v2, v1, or (if neither is writable) pinning and rlimits. Where
nothing else tells whose a process is, a reaper is the action's nearest subreaper, which a daemon
cannot leave; it kills everything below it when the supervisor dies.
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
    become,
    close_all_but,
    heard_from,
    make_pipes,
    received,
    start,
    whole,
)
from slackwater.sandbox.limits import Limits

_STARTED = struct.Struct("<i")
_ENDED = struct.Struct("<iddq")
_ANSWER_WITHIN_S = 20.0
_SUPERVISOR_GONE = signal.SIGUSR1


def start_below_reaper(launch: Launch) -> LaunchedProcess:
    """As `launch.start`, with a reaper between; the child's `reaper` is its number."""
    own, others = make_pipes()
    heard, said = os.pipe2(os.O_CLOEXEC)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    supervisor = os.getpid()
    reaper = os.fork()
    if reaper == 0:
        _live(launch, others, said, theirs, supervisor)
    theirs.close()
    others.close()
    os.close(said)
    ours.settimeout(_ANSWER_WITHIN_S)
    try:
        head, descriptors = received(ours, _STARTED.size)
        if not descriptors:
            raise UnavailableError("a process that was started has gone")
        pid, pidfd = _STARTED.unpack(head)[0], descriptors[0]
        if why := heard_from(heard):
            os.close(pidfd)
            raise RefusedError(why.decode(errors="replace"))
    except (OSError, UnavailableError, RefusedError) as error:
        own.close()
        _end(reaper, ours)
        if isinstance(error, RefusedError):
            raise
        raise UnavailableError(f"no process can be started: {error}") from None
    finally:
        os.close(heard)
    process_tree.helpers.add(reaper)
    child = own.child(pid, lambda _: _reaped(pid, reaper, ours), time.monotonic(), pidfd)
    child.reaper = reaper
    return child


def end_below(reaper: int) -> None:
    """SIGKILL everything below it."""

    def alive() -> list[int]:
        below = (pid for pid in process_tree.below(reaper) if pid != reaper)
        return [pid for pid in below if process_tree.is_alive(pid)]

    process_tree.end_all(alive)


def _reaped(pid: int, reaper: int, ours: socket.socket) -> ProcessExit:
    """How the action ended; then its reaper goes. If that was killed, its children are ours."""
    try:
        return ProcessExit(*_ENDED.unpack(whole(ours, _ENDED.size)))
    except (OSError, UnavailableError):
        return ProcessExit.reaped(pid)
    finally:
        _end(reaper, ours)


def _end(reaper: int, ours: socket.socket) -> None:
    ours.close()
    end_below(reaper)
    process_tree.end(reaper)


def _live(
    launch: Launch, ends: ChildPipes, said: int, theirs: socket.socket, supervisor: int
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
            become(launch, ends, said)
        socket.send_fds(theirs, [_STARTED.pack(pid)], [os.pidfd_open(pid)])
        close_all_but(theirs.fileno())
        while signal.sigwaitinfo(awaited).si_signo == signal.SIGCHLD:
            _reap_all(pid, theirs)
        end_below(os.getpid())
    finally:
        os._exit(0)


def _reap_all(first: int, theirs: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid == first:
                ended = ProcessExit(status, used.ru_utime, used.ru_stime, used.ru_maxrss)
                theirs.sendall(_ENDED.pack(*ended))


class Precedence(Enum):
    """How an action's processes stand to all others on the machine, where the kernel tells."""

    EQUAL = "equal"
    LOW = "low"
    LAST = "last"  # a core that it runs on counts as free


class Fence(Protocol):
    """Round one action."""

    def rlimits(self, limits: Limits) -> Mapping[int, int]:
        """Additional rlimits of its processes."""

    def start(self, launch: Launch, limits: Limits) -> LaunchedProcess:
        """Start a process inside, with these cores and limits."""

    def set_precedence(self, precedence: Precedence) -> None:
        """From now on, if it can be set here; every start begins with EQUAL."""

    def kill_all(self) -> None:
        """Kill all processes inside."""

    def cpu_s(self) -> float:
        """CPU time used inside so far, if counted."""

    def memory_kills(self) -> int:
        """How often the kernel ended a process inside for want of memory, so far."""


class Fences(Protocol):
    """Makes fences in one way, and uses them again."""

    name: str
    pins_for_good: bool  # whether a process cannot take more cores than it was given

    def take(self, environment: str, user: int | None, cores: frozenset[int]) -> Fence:
        """For one action on these cores."""

    def give_back(self, fence: Fence) -> None:
        """Return an empty fence."""

    def others(self) -> set[int]:
        """Children of this process that are not actions."""

    def close(self) -> None:
        """Take down everything."""


class PinnedFence:
    """Pinning and rlimits. Members are known by user, pid namespace or reaper, never by claim."""

    def __init__(self, environment: str, user: int | None, live: "set[PinnedFence]") -> None:
        self._environment = environment
        self._user = user
        self._live = live
        self._child: LaunchedProcess | None = None

    def rlimits(self, limits: Limits) -> Mapping[int, int]:
        others = 0 if self._user is not None else _processes_of_user(os.getuid())
        return {
            resource.RLIMIT_AS: limits.memory_bytes,
            resource.RLIMIT_NPROC: limits.processes + others,
        }

    def start(self, launch: Launch, limits: Limits) -> LaunchedProcess:
        # Also bwrap: killed while it sets up its namespaces, it leaves a process that waits for it.
        self._child = start_below_reaper(launch) if launch.user is None else start(launch)
        self._live.add(self)
        return self._child

    def set_precedence(self, precedence: Precedence) -> None:
        """Needs a control group."""

    def kill_all(self) -> None:
        """Neighbours may share the user: only the last one to end kills what they left."""
        child = self._child
        if child is None:
            return
        if not process_tree.is_alive(child.pid):
            self._live.discard(self)
        for pid in process_tree.below(child.pid):
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
        """Kill orphans that came to this process because their reaper was killed."""
        known = process_tree.helpers | {
            fence._child.pid for fence in (*self._live, self) if fence._child is not None
        }
        for pid in set(process_tree.children(os.getpid())) - known:
            for stray in process_tree.below(pid):
                process_tree.kill(stray)

    def cpu_s(self) -> float:
        return 0.0

    def memory_kills(self) -> int:
        return 0

    def leave(self) -> None:
        """Its action is over."""
        self._live.discard(self)


class PinnedFences:
    """Where no control group can be written to."""

    name = "pinning"
    pins_for_good = False

    def __init__(self) -> None:
        self._live: set[PinnedFence] = set()

    def take(self, environment: str, user: int | None, cores: frozenset[int]) -> Fence:
        return PinnedFence(environment, user, self._live)

    def give_back(self, fence: Fence) -> None:
        assert isinstance(fence, PinnedFence)
        fence.leave()

    def others(self) -> set[int]:
        return set()

    def close(self) -> None:
        """Nothing to take down."""


def _processes_of_user(user: int) -> int:
    """The limit counts threads of everything that the user runs, also elsewhere."""
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
