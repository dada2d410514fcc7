"""Namespaces that are made once for an environment and entered by each of its actions.

To make mounts takes milliseconds, to enter them microseconds. Mounts live as long as somebody has them open; a
process namespace needs a process that lives in it, so it has a holder. All of it is root's.
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
from slackwater.sandbox.fences import TOKEN
from slackwater.sandbox.mounts import Mounts

_READY_WITHIN_S = 20.0
_NAMES = {
    linux.CLONE_NEWNS: "mnt",
    linux.CLONE_NEWPID: "pid",
    linux.CLONE_NEWUTS: "uts",
    linux.CLONE_NEWCGROUP: "cgroup",
}
_INSIDE = ("/bin/sh", "-c", "echo; exec /bin/sleep infinity")


def _opened(pid: int, kinds: Sequence[int]) -> dict[int, int]:
    flags = os.O_RDONLY | os.O_CLOEXEC
    return {kind: os.open(f"/proc/{pid}/ns/{_NAMES[kind]}", flags) for kind in kinds}


def _heard(descriptor: int) -> bytes:
    """The next that comes; empty at its end, or if nothing comes in time."""
    if not select.select([descriptor], [], [], _READY_WITHIN_S)[0]:
        return b""
    return os.read(descriptor, 4096)


class HeldMounts:
    """Mounts without a process."""

    def __init__(self, mounts: Mounts) -> None:
        ready, said = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            _make(mounts, said)
        try:
            os.close(said)
            heard = _heard(ready)
            if heard != b"+":
                raise UnavailableError(f"no mounts can be made: {heard.decode(errors='replace')}")
            self._open = _opened(pid, (linux.CLONE_NEWNS,))
        finally:
            os.close(ready)
            process_tree.kill(pid)
            os.waitpid(pid, 0)

    def enter(self) -> Mapping[int, int]:
        """Descriptors by kind."""
        return self._open

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


def _make(mounts: Mounts, said: int) -> None:
    try:
        linux.die_with_parent(signal.SIGKILL)
        os.umask(0o022)  # others pass through the folders that are made on the way
        mounts.make()
        os.write(said, b"+")
        signal.pause()
    except BaseException as error:  # noqa: BLE001  (this process must end here, whatever went wrong)
        os.write(said, str(error).encode()[:4000])
    finally:
        os._exit(1)


@dataclass(slots=True)
class _Starting:
    """bwrap, started; `info` will say which process is the first inside, `ready` that all is set up."""

    pid: int
    info: int
    ready: int
    errors: int

    def close(self) -> None:
        for descriptor in (self.info, self.ready, self.errors):
            os.close(descriptor)


class HeldSandbox:
    """All namespaces of one bubblewrap, held by a process that sleeps inside; `argv` is bwrap with its options.

    It is started at once and waited for when it is first entered.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._starting: _Starting | None = self._start()
        self._pid = self._starting.pid
        self._open: dict[int, int] = {}

    def _start(self) -> _Starting:
        info, info_out = os.pipe2(os.O_CLOEXEC)
        ready, ready_out = os.pipe2(os.O_CLOEXEC)
        errors, errors_out = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.posix_spawn(
                self._argv[0],
                [*self._argv, "--info-fd", "3", "--", *_INSIDE],
                {"PATH": "/usr/bin:/bin", TOKEN: "/"},  # a fence must not take it for an orphan
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, ready_out, 1),
                    (os.POSIX_SPAWN_DUP2, errors_out, 2),
                    (os.POSIX_SPAWN_DUP2, info_out, 3),
                ],
                setsid=True,
            )
        except OSError as error:
            for descriptor in (info, ready, errors):
                os.close(descriptor)
            raise UnavailableError(f"no process can be started: {error.strerror}") from None
        finally:
            for descriptor in (info_out, ready_out, errors_out):
                os.close(descriptor)
        return _Starting(pid, info, ready, errors)

    def enter(self) -> Mapping[int, int]:
        """Descriptors by kind; waits until they are there."""
        if self._starting is not None:
            starting, self._starting = self._starting, None
            try:
                if _heard(starting.ready) != b"\n":
                    why = _heard(starting.errors).decode(errors="replace").strip()
                    raise UnavailableError(f"bwrap does not start: {why}")
                first = json.loads(os.read(starting.info, 4096))["child-pid"]
                self._open = _opened(first, tuple(_NAMES))
            finally:
                starting.close()
        return self._open

    def close(self) -> None:
        if self._starting is not None:
            self._starting.close()
        for descriptor in self._open.values():
            os.close(descriptor)
        process_tree.kill(self._pid)
        with contextlib.suppress(ChildProcessError):  # it may have been reaped
            os.waitpid(self._pid, 0)
