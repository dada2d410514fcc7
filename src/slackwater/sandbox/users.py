"""Users for environments: unassigned uids, in one block per supervisor.

Only root can assign them. Different users cannot signal each other or read each other's files, and
the kernel counts each user's processes.
"""

import fcntl
import os
from pathlib import Path

from slackwater.model.errors import UnavailableError
from slackwater.sandbox import process_tree

FIRST = 1_000_000_000
BLOCK = 65_536
_BLOCKS = 4_096
_LOCKS = Path("/run/slackwater/users")


class UserPool:
    """One block of uids; a lock on a file reserves it for the life of this process."""

    def __init__(self) -> None:
        _LOCKS.mkdir(parents=True, exist_ok=True, mode=0o700)
        for block in range(_BLOCKS):
            descriptor = os.open(_LOCKS / str(block), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            self._lock = descriptor
            self._first = FIRST + block * BLOCK
            break
        else:
            raise UnavailableError(f"all {_BLOCKS} blocks of users in {_LOCKS} are taken")
        self._taken: set[int] = set()
        self._kill_leftovers()

    def _kill_leftovers(self) -> None:
        """Kill the processes of a killed supervisor: the lock's holder owns the whole block."""
        block = range(self._first, self._first + BLOCK)

        def find_leftovers() -> list[int]:
            return [pid for pid in process_tree.pids_of_users(block) if process_tree.is_alive(pid)]

        if not process_tree.kill_until_gone(find_leftovers):
            raise UnavailableError(f"processes of users {self._first} and up cannot be ended")

    def allocate(self) -> int:
        """The lowest free uid."""
        for user in range(self._first, self._first + BLOCK):
            if user not in self._taken:
                self._taken.add(user)
                return user
        raise UnavailableError(f"all {BLOCK} users of this supervisor are taken")

    def reserve(self, user: int) -> bool:
        """Take the uid that an environment had before, if this block contains it and it is free."""
        if user in self._taken or not self._first <= user < self._first + BLOCK:
            return False
        self._taken.add(user)
        return True

    def release(self, user: int) -> None:
        self._taken.discard(user)

    def close(self) -> None:
        os.close(self._lock)


def open_user_pool() -> UserPool | None:
    """A pool for this process; None unless it is root and can create lock files."""
    if os.getuid() != 0:
        return None
    try:
        return UserPool()
    except OSError:
        return None
