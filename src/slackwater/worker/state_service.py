"""The node's state manager, which runs in its agent; workers reach it by a socket.

Budgets come from the environment (`[residency]` of the configuration): SLACKWATER_STATE_DEVICE_MB
(unset: states are unmanaged), SLACKWATER_STATE_HOST_MB (default: half of the machine's memory) and
SLACKWATER_STATE_DISK_MB for spilled states (default: none).
"""

import contextlib
import logging
import os
import secrets
import ssl
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slackwater.model.errors import ConfigError, SlackwaterError
from slackwater.model.residency import DEVICE_MB, DISK_MB, HOST_MB, StateBudgets
from slackwater.wire.agent import StatePlace
from slackwater.worker.process import address_of

if TYPE_CHECKING:
    from slackwater.state.manager import StateManager

logger = logging.getLogger(__name__)

SOCKET_VARIABLE = "SLACKWATER_STATE_SOCKET"
MOVED = "moved-"  # prefix of the names of states that came from another node


@dataclass(frozen=True, slots=True)
class NodeStates:
    """The node's state manager, if any, and the environment that workers need to reach it."""

    manager: "StateManager | None" = None
    environment: Mapping[str, str] = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)  # incoming models, by their secret

    def prefetch(self, models: list[str], holding: list[str]) -> None:
        """Set which models run next, and which are inside a phase."""
        if self.manager is not None:
            self.manager.prefetch_models(models, holding)

    def counts(self) -> dict[str, float]:
        return {} if self.manager is None else self.manager.counts()

    def forget(self, model: str) -> None:
        """Drop states of a model that no worker holds."""
        if self.manager is not None:
            self.manager.forget_abandoned(f"{model}@")

    @contextlib.contextmanager
    def receiving(self, host: Callable[[], str], *, encrypted: bool) -> Iterator[StatePlace | None]:
        """Accept states from other nodes; yields None without a manager."""
        if self.manager is None:
            yield None
            return
        from slackwater.state.migration import MigrationServer

        context, pin = _create_certificate() if encrypted else (None, None)
        warm = self.manager.controller.budgets.disk_bytes == 0
        server = MigrationServer(self.manager, self.expected, host(), warm=warm, context=context)
        try:
            yield StatePlace("{}:{}".format(*server.address), pin)
        finally:
            server.close()

    def send(self, model: str, target: StatePlace, secret: str) -> str:
        """Send a model's state to another node; returns why it failed, or ""."""
        from slackwater.state.migration import migrate

        deployment = None if self.manager is None else self.manager.find_active(f"{model}@")
        if self.manager is None or deployment is None:
            return f"no worker has a state of {model} here"
        arrives_as = f"{model}@{MOVED}{secrets.token_hex(4)}"
        try:
            address = address_of(target.address)
            sent = migrate(
                self.manager, deployment, address, secret, arrives_as=arrives_as, pin=target.pin
            )
        except SlackwaterError as error:
            return str(error)
        logger.info("model %s: %d bytes of its state went to %s", model, sent, target.address)
        return ""


def _create_certificate() -> "tuple[ssl.SSLContext, str]":
    """A TLS context and the certificate's pin, for the life of this process."""
    from slackwater.wire.certificate import Certificate

    with tempfile.TemporaryDirectory(prefix="slackwater-states-") as folder:
        certificate = Certificate.load_or_create(Path(folder))
        return certificate.context(), certificate.pin


@contextlib.contextmanager
def state_service(logs: Path, secret: str) -> Iterator[NodeStates]:
    """The manager inside the block; none if no device budget is set."""
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
