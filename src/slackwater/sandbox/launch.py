"""Starting one process with its limits already on it.

Everything between fork and exec happens in the child, and what goes wrong there comes back through a pipe
that a successful exec closes; so a started process is known to be confined, and when it began.
The process that forks must have one thread only.
"""

import contextlib
import os
import resource
import select
import signal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from slackwater.model.errors import UnavailableError
from slackwater.sandbox import linux

_SECOND = struct.Struct("<7si")
_SECOND_MARK = b"second\0"
_SECOND_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run and how to confine it.

    The child takes `cores` and becomes `user` (root only). Root also gives it a network of its own, and lets it
    enter namespaces that are held for it: their descriptors by kind (`linux.CLONE_NEWNS` and others).
    """

    argv: Sequence[str]
    variables: Mapping[str, str]
    folder: Path
    user: int | None = None
    cores: frozenset[int] = frozenset()
    rlimits: Mapping[int, int] = field(default_factory=dict)
    own_network: bool = False
    enter: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Child:
    """A process that was started: `execed` reads as ended once its program runs, or tells why it does not."""

    pid: int
    pidfd: int
    stdin: int
    stdout: int
    stderr: int
    execed: int

    def close_stdin(self) -> None:
        """Its input is over. Once only: the number may be somebody else's by then."""
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def close(self) -> None:
        """Let go of it."""
        self.close_stdin()
        for descriptor in (self.pidfd, self.stdout, self.stderr, self.execed):
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ChildEnds:
    """What the child has of the pipes."""

    stdin: int
    stdout: int
    stderr: int
    said: int

    def close(self) -> None:
        for descriptor in (self.stdin, self.stdout, self.stderr, self.said):
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class OwnEnds:
    """What the starter has of the pipes; none of them blocks."""

    stdin: int
    stdout: int
    stderr: int
    execed: int

    def close(self) -> None:
        for descriptor in (self.stdin, self.stdout, self.stderr, self.execed):
            os.close(descriptor)

    def child(self, pid: int, launch: Launch) -> Child:
        """The process that runs the program: `pid`, or one that it makes in a process namespace."""
        if linux.CLONE_NEWPID in launch.enter:
            try:
                pid = self._pid_of_second()
            except UnavailableError:
                self.close()
                raise
        return Child(pid, os.pidfd_open(pid), self.stdin, self.stdout, self.stderr, self.execed)

    def _pid_of_second(self) -> int:
        if not select.select([self.execed], [], [], _SECOND_WITHIN_S)[0]:
            raise UnavailableError("a process that was started does not say what it started")
        said = os.read(self.execed, _SECOND.size)
        if len(said) == _SECOND.size and said.startswith(_SECOND_MARK):
            return int(_SECOND.unpack(said)[1])
        with contextlib.suppress(BlockingIOError):
            said += os.read(self.execed, 4096)
        raise UnavailableError(
            said.decode(errors="replace") or "a process that was started has gone"
        )


def make_pipes() -> tuple[OwnEnds, ChildEnds]:
    """Four pipes; UnavailableError if there are no descriptors left."""
    made: list[int] = []
    try:
        for _ in range(4):
            made += os.pipe2(os.O_CLOEXEC)
    except OSError as error:
        for descriptor in made:
            os.close(descriptor)
        raise UnavailableError(f"no process can be started: {error.strerror}") from None
    in_read, in_write, out_read, out_write, err_read, err_write, said_read, said_write = made
    for descriptor in (in_write, out_read, err_read, said_read):
        os.set_blocking(descriptor, False)
    return (
        OwnEnds(in_write, out_read, err_read, said_read),
        ChildEnds(in_read, out_write, err_write, said_write),
    )


def start(launch: Launch) -> Child:
    """Fork, confine, exec."""
    own, others = make_pipes()
    try:
        pid = os.fork()
    except OSError as error:
        own.close()
        others.close()
        raise UnavailableError(f"no process can be started: {error.strerror}") from None
    if pid == 0:
        become(launch, others)
    others.close()
    return own.child(pid, launch)


def become(launch: Launch, ends: ChildEnds, *, outside: int | None = None) -> NoReturn:
    """In a fresh child: confine it and run the program. If it has a network and IPC of its own already, `outside` is
    the machine's network."""
    try:
        if linux.CLONE_NEWPID in launch.enter:
            _go_on_inside(launch.enter[linux.CLONE_NEWPID], ends)
        os.setsid()
        os.umask(0o022)
        for target, source in enumerate((ends.stdin, ends.stdout, ends.stderr)):
            os.dup2(source, target)
        if launch.own_network and outside is None:
            have_own_network()
        elif outside is not None and not launch.own_network:
            linux.enter(outside, linux.CLONE_NEWNET)
        if outside is None and launch.enter:
            linux.unshare(linux.CLONE_NEWIPC)
        _confine(launch)
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvpe(launch.argv[0], list(launch.argv), dict(launch.variables))
    except BaseException as error:  # noqa: BLE001  (this process must end here, whatever went wrong)
        os.write(ends.said, str(error).encode()[:4000])
    finally:
        os._exit(127)


def _go_on_inside(processes: int, ends: ChildEnds) -> None:
    """Only a process that is made after entering is in a process namespace: make it, say which, and go."""
    linux.enter(processes, linux.CLONE_NEWPID)
    pid = linux.fork_sibling()
    if pid > 0:
        os.write(ends.said, _SECOND.pack(_SECOND_MARK, pid))
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
    if launch.user is not None:
        os.setgroups([])
        os.setresgid(launch.user, launch.user, launch.user)
        os.setresuid(launch.user, launch.user, launch.user)
    linux.gain_no_privileges()
    linux.die_with_parent(signal.SIGKILL)


def said_instead(execed: int) -> str | None:
    """Of a `Child.execed` that became readable, or will since its process has ended: why the program does not run, or None if it does."""
    select.select([execed], [], [], _SECOND_WITHIN_S)  # who made the process may not be quite gone
    said = os.read(execed, 4096)
    return said.decode(errors="replace") if said else None


def can_have_namespaces() -> bool:
    """Whether this process may give its children networks and mounts of their own; root in a container may not."""
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
