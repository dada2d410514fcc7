"""Starting one process with its limits already on it.

Everything between fork and exec happens in the child, and what goes wrong there comes back through a pipe
that a successful exec closes; so a started process is known to be confined, and when it began.
The process that forks must have one thread only.
"""

import os
import resource
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from slackwater.model.errors import UnavailableError
from slackwater.sandbox import linux


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A folder that another user can read but not reach: `barrier` is the folder above it that bars the way."""

    barrier: Path
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run and how to confine it.

    The child takes `cores` and becomes `user` (root only). Root also gives it namespaces of its own: a network, and
    mounts where `own_tmp` lies over the machine's temporary folders and `shown` folders can be reached.
    """

    argv: Sequence[str]
    variables: Mapping[str, str]
    folder: Path
    user: int | None = None
    cores: frozenset[int] = frozenset()
    rlimits: Mapping[int, int] = field(default_factory=dict)
    own_network: bool = False
    own_tmp: Path | None = None
    shown: Sequence[Uncovered] = ()


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

    def child(self, pid: int) -> Child:
        return Child(pid, os.pidfd_open(pid), self.stdin, self.stdout, self.stderr, self.execed)


SHARED_TMP = ("/tmp", "/var/tmp", "/dev/shm")


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
    return own.child(pid)


def become(launch: Launch, ends: ChildEnds, *, outside: int | None = None) -> NoReturn:
    """In a fresh child: confine it and run the program. If it has a network and IPC of its own already, `outside` is
    the machine's network."""
    try:
        os.setsid()
        os.umask(0o022)
        for target, source in enumerate((ends.stdin, ends.stdout, ends.stderr)):
            os.dup2(source, target)
        if launch.own_network and outside is None:
            have_own_network()
        elif outside is not None and not launch.own_network:
            linux.enter_network(outside)
        if outside is None and _has_own_mounts(launch):
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


def have_own_network() -> None:
    """No way out, but a loopback."""
    linux.unshare(linux.CLONE_NEWNET)
    linux.loopback_up()


def _confine(launch: Launch) -> None:
    if launch.cores:
        os.sched_setaffinity(0, launch.cores)
    if _has_own_mounts(launch):
        _have_own_mounts(launch)
    os.chdir(launch.folder)
    for kind, most in launch.rlimits.items():
        resource.setrlimit(kind, (most, most))
    if launch.user is not None:
        os.setgroups([])
        os.setresgid(launch.user, launch.user, launch.user)
        os.setresuid(launch.user, launch.user, launch.user)
    linux.gain_no_privileges()
    linux.die_with_parent(signal.SIGKILL)


def _has_own_mounts(launch: Launch) -> bool:
    return launch.own_tmp is not None or bool(launch.shown)


def _have_own_mounts(launch: Launch) -> None:
    """Folders go out of sight on the way, so they are opened first and mounted by descriptor.

    What covers a folder that must be seen again is always fresh: in a folder of the action's own it could have
    left a link for this to follow.
    """
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    needed = {
        path: _opened(path) for path in (launch.folder, *(one.folder for one in launch.shown))
    }
    covered = {one.barrier for one in launch.shown}
    for barrier in covered:
        linux.mount("none", str(barrier), "tmpfs", linux.MS_NOSUID, "mode=755,size=64k")
    if launch.own_tmp is not None:
        tmp = _opened(launch.own_tmp)
        for shared in SHARED_TMP:
            if any(path.is_relative_to(shared) for path in needed):
                linux.mount("none", shared, "tmpfs", linux.MS_NOSUID, "mode=1777,size=64m")
                covered.add(Path(shared))
            elif os.path.isdir(shared):  # noqa: PTH112
                linux.mount(f"/proc/self/fd/{tmp}", shared, flags=linux.MS_BIND)
    for path, descriptor in needed.items():
        if any(path.is_relative_to(cover) for cover in covered):
            path.mkdir(parents=True, exist_ok=True)
            linux.mount(f"/proc/self/fd/{descriptor}", str(path), flags=linux.MS_BIND)


def _opened(path: Path) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def barrier_of(folder: Path) -> Path | None:
    """The highest folder above that strangers may not pass through; None if they can reach it."""
    for above in reversed(folder.resolve().parents):
        if not above.stat().st_mode & 0o001:
            return above
    return None


def said_instead(execed: int) -> str | None:
    """Of a `Child.execed` that became readable: why the program does not run, or None if it does."""
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
