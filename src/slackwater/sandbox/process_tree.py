"""Processes below one of ours, found through /proc."""

import contextlib
import os
import signal
from collections.abc import Iterator

# Children of this process that no action started: nobody takes them for what an action has left
# behind.
helpers: set[int] = set()


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
    yield pid
    for child in children(pid):
        yield from below(child)


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
