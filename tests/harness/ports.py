"""Ports that no other test or benchmark of this machine is given."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

_held: list[IO[str]] = []


def free_port() -> int:
    """Below where services look for ports themselves. It is taken later than it is chosen, so this
    process keeps a lock on it to its end.
    """
    folder = Path(tempfile.gettempdir()) / f"slackwater-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in random.SystemRandom().sample(range(4_000, 10_000), 500):
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        _held.append(lock)
        return port
    raise AssertionError("no free port from 4000 to 10000")
