"""The node's state manager, held by its agent: where the environment gives it budgets, workers find it by a socket.

SLACKWATER_STATE_DEVICE_MB    what all models' states on the device may take; unset: models stay where they are, unmanaged
SLACKWATER_STATE_HOST_MB      host memory for states that wait (half of the machine's, if unset)
SLACKWATER_STATE_DISK_MB      disk for states that are spilled (none, if unset)
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from slackwater.model.errors import ConfigError
from slackwater.model.residency import StateBudgets

DEVICE, HOST, DISK = (f"SLACKWATER_STATE_{tier}_MB" for tier in ("DEVICE", "HOST", "DISK"))
SOCKET_VARIABLE = "SLACKWATER_STATE_SOCKET"


@contextlib.contextmanager
def state_service(logs: Path, secret: str) -> Iterator[Mapping[str, str]]:
    """What workers must have in their environment to reach the manager; nothing where there is none."""
    device = _megabytes(DEVICE, 0)
    if not device:
        yield {}
        return
    from slackwater.state.manager import StateManager  # NumPy, only when needed
    from slackwater.state.service import StateServer

    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    budgets = StateBudgets(device, _megabytes(HOST, half), _megabytes(DISK, 0))
    # A socket's path may have 107 bytes: not under the logs.
    with tempfile.TemporaryDirectory(prefix="slackwater-state-") as folder:
        manager = StateManager(budgets, logs / "state")
        server = StateServer(manager, Path(folder) / "manager", secret)
        try:
            yield {SOCKET_VARIABLE: str(server.path)}
        finally:
            server.close()
            manager.close()


def _megabytes(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise ConfigError.of(name, text, "must be a number of megabytes")
    return int(size * (1 << 20))
