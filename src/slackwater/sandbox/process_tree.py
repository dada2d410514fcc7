"""Processes below one of ours, found through /proc."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator

# Children of this process that no action started: nobody takes them for what an action has left
# behind.
helpers: set[int] = set()
_END_WITHIN_S = 5.0


def _read(name: str) -> bytes:
    with open(f"/proc/{name}", "rb") as file:
        return file.read()


def children(pid: int) -> list[int]:
    """Of any of the process's threads; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += [int(child) for child in _read(f"{pid}/task/{thread}/children").split()]
    return found


def below(pid: int) -> Iterator[int]:
    """The process and everything that it started, and they started."""
    found = [pid]
    while found:
        yield (pid := found.pop())
        found += children(pid)


def is_alive(pid: int) -> bool:
    """Whether it still runs, and does not merely wait to be reaped."""
    try:
        state = _read(f"{pid}/stat").rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in (b"Z", b"X")


def variables(pid: int) -> dict[str, str]:
    """The variables that a process was started with; empty if it may not be asked."""
    try:
        raw = _read(f"{pid}/environ")
    except OSError:
        return {}
    pairs = (item.decode(errors="replace").partition("=") for item in raw.split(b"\0"))
    return {name: value for name, _, value in pairs}


def owned_by(users: range) -> Iterator[int]:
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid in users:
                yield int(entry.name)


def kill(pid: int) -> None:
    """SIGKILL, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def end(helper: int) -> None:
    """SIGKILL a child that no action started, and reap it."""
    kill(helper)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(helper, 0)
    helpers.discard(helper)


def end_all(find: Callable[[], Collection[int]]) -> bool:
    """SIGKILL what is found until nothing is: a process may fork meanwhile. False: it stays."""
    deadline_s = time.monotonic() + _END_WITHIN_S
    while left := find():
        if time.monotonic() >= deadline_s:
            return False
        for pid in left:
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
