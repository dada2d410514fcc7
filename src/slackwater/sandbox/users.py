"""Users to run environments as: numbers that belong to nobody, a block of them for each supervisor of the machine.

Only root can give them out. Processes of different users cannot signal each other or read each other's files,
and the kernel counts each user's processes.
"""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from slackwater.model.errors import UnavailableError

FIRST = 1_000_000_000
BLOCK = 65_536
_BLOCKS = 4_096
LOCKS = Path("/run/slackwater/users")


class Users:
    """One block, held by a lock on a file for as long as this process lives."""

    def __init__(self, locks: Path = LOCKS) -> None:
        locks.mkdir(parents=True, exist_ok=True, mode=0o700)
        for block in range(_BLOCKS):
            descriptor = os.open(locks / str(block), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            self._lock = descriptor
            self._first = FIRST + block * BLOCK
            break
        else:
            raise UnavailableError(f"all {_BLOCKS} blocks of users in {locks} are taken")
        self._taken: set[int] = set()

    def take(self) -> int:
        """The lowest number that is free."""
        for user in range(self._first, self._first + BLOCK):
            if user not in self._taken:
                self._taken.add(user)
                return user
        raise UnavailableError(f"all {BLOCK} users of this supervisor are taken")

    def adopt(self, paths: Sequence[Path]) -> int:
        """A user for folders that a supervisor before this one has left: they become its own."""
        user = self.take()
        for path in paths:
            for folder, folders, names in os.walk(path):
                for name in (".", *folders, *names):
                    os.chown(Path(folder, name), user, user, follow_symlinks=False)
        return user

    def give_back(self, user: int) -> None:
        self._taken.discard(user)

    def close(self) -> None:
        os.close(self._lock)


def users_here() -> Users | None:
    """None unless this process is root and may keep locks."""
    if os.getuid() != 0:
        return None
    try:
        return Users()
    except OSError:
        return None
