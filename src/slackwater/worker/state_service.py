"""The node's state manager, held by its agent: where the environment gives it budgets, workers find it by a socket.

(`[residency]` of the service's configuration, or by hand for an agent that joins)

SLACKWATER_STATE_DEVICE_MB    what all models' states on the device may take; unset: models stay where they are, unmanaged
SLACKWATER_STATE_HOST_MB      host memory for states that wait (half of the machine's, if unset)
SLACKWATER_STATE_DISK_MB      disk for states that are spilled (none, if unset)
"""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slackwater.model.errors import ConfigError
from slackwater.model.residency import DEVICE_MB, DISK_MB, HOST_MB, StateBudgets

if TYPE_CHECKING:
    from slackwater.state.manager import StateManager

SOCKET_VARIABLE = "SLACKWATER_STATE_SOCKET"


@dataclass(frozen=True, slots=True)
class NodeStates:
    """The node's state manager, if there is one, and what workers must have in their environment to reach it."""

    manager: "StateManager | None" = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def prefetch(self, models: list[str]) -> None:
        """What these models' trainers compute on next."""
        if self.manager is not None:
            self.manager.prefetch_models(models)


@contextlib.contextmanager
def state_service(logs: Path, secret: str) -> Iterator[NodeStates]:
    """The manager, while the agent lives."""
    device = _megabytes(DEVICE_MB, 0)
    if not device:
        yield NodeStates()
        return
    from slackwater.state.manager import StateManager  # NumPy, only when needed
    from slackwater.state.service import StateServer

    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    budgets = StateBudgets(device, _megabytes(HOST_MB, half), _megabytes(DISK_MB, 0))
    manager = StateManager(budgets, logs / "state")
    server = StateServer(manager, f"@slackwater-state-{secrets.token_hex(8)}", secret)
    try:
        yield NodeStates(manager, {SOCKET_VARIABLE: server.path})
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
