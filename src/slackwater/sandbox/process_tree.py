"""Processes below one of ours, found through /proc."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator

# Children of this process that no action started; cleaning up after actions must spare them.
helpers: set[int] = set()
_END_WITHIN_S = 5.0


def _read(name: str) -> bytes:
    with open(f"/proc/{name}", "rb") as file:
        return file.read()


def children(pid: int) -> list[int]:
    """Children of all of the process's threads; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += [int(child) for child in _read(f"{pid}/task/{thread}/children").split()]
    return found


def subtree(pid: int) -> Iterator[int]:
    """The process and all of its descendants."""
    found = [pid]
    while found:
        yield (pid := found.pop())
        found += children(pid)


def is_alive(pid: int) -> bool:
    """Whether it still runs: a zombie does not."""
    try:
        state = _read(f"{pid}/stat").rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in (b"Z", b"X")


def variables(pid: int) -> dict[str, str]:
    """The variables that a process was started with; empty if they cannot be read."""
    try:
        raw = _read(f"{pid}/environ")
    except OSError:
        return {}
    pairs = (item.decode(errors="replace").partition("=") for item in raw.split(b"\0"))
    return {name: value for name, _, value in pairs}


def pids_of_users(users: range) -> Iterator[int]:
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid in users:
                yield int(entry.name)


def kill(pid: int) -> None:
    """SIGKILL, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_and_reap(helper: int) -> None:
    """SIGKILL a child that no action started, and reap it."""
    kill(helper)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(helper, 0)
    helpers.discard(helper)


def kill_until_gone(find: Callable[[], Collection[int]]) -> bool:
    """SIGKILL what `find` returns until it returns nothing, since a process may fork meanwhile.

    False if some remain after `_END_WITHIN_S`.
    """
    deadline_s = time.monotonic() + _END_WITHIN_S
    while pids := find():
        if time.monotonic() >= deadline_s:
            return False
        for pid in pids:
            kill(pid)
        time.sleep(0.001)
    return True


def kill_all_of_user(user: int) -> None:
    """SIGKILL all processes of a user at once, so that none can fork meanwhile; root only."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(user, user, user)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
