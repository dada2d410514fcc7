"""A deployment's state from one node to another: its image over a connection, checked, into the other manager's host memory (PlexRL 4.5.3).

The sender keeps its own until the receiver has said that all of it is there.
"""

import hmac
import json
import logging
import socket
import struct
import threading
import zlib
from typing import Any

from slackwater.model.errors import ConfigError, RefusedError, SlackwaterError, UnavailableError
from slackwater.model.residency import Part, Role, StateKey, Tier
from slackwater.state.manager import StateManager

logger = logging.getLogger(__name__)
_LENGTH = struct.Struct("<Q")
_PIECE = 4 << 20
_LONGEST_HEAD = 64 << 20
_SILENT_S = 60.0


def migrate(manager: StateManager, deployment: str, address: tuple[str, int], secret: str) -> None:
    """Send the state to the node at the address and forget it here; on any error it is still here, whole."""
    manager.evict(deployment, Tier.HOST)
    manager.ensure(deployment, Tier.HOST)
    if manager.is_blank(deployment):
        raise RefusedError(f"state of {deployment}: has no content yet")
    with manager.reading(deployment) as image:
        entry = manager.catalogue.entries[deployment]
        if entry.borrowed_from:
            raise RefusedError(
                f"state of {deployment}: parts of it are stored with {', '.join(sorted(entry.borrowed_from))}; migrate those first"
            )
        data = image.data
        head = {
            "secret": secret,
            "deployment": deployment,
            "parts": [_facts(part) for part in entry.on_device.parts],
            "about": dict(manager.about(deployment)),
            "bytes": len(data),
            "crc32": zlib.crc32(data.data),
        }
        try:
            with socket.create_connection(address, timeout=_SILENT_S) as connection:
                _send(connection, json.dumps(head).encode())
                connection.sendall(data.data)
                said = json.loads(_receive(connection))
        except (OSError, EOFError, ValueError) as error:
            raise UnavailableError(
                f"state of {deployment}: {address[0]}:{address[1]} took it not: {error}; it is still here"
            ) from error
    if said.get("error"):
        raise RefusedError(f"state of {deployment}: {said['error']}; it is still here")
    manager.forget(deployment)


class MigrationServer:
    """Takes states from other nodes that know the secret."""

    def __init__(self, manager: StateManager, secret: str, host: str = "127.0.0.1") -> None:
        self._manager, self._secret = manager, secret
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True, name="state-migration").start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._take, args=(connection,), daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_SILENT_S)
            try:
                error = self._taken(connection)
                _send(connection, json.dumps({"error": error}).encode())
            except (OSError, EOFError, ValueError, KeyError, TypeError) as problem:
                logger.warning("a state did not arrive: %s", problem)

    def _taken(self, connection: socket.socket) -> str | None:
        """Why the state was not taken; None if it was."""
        head: dict[str, Any] = json.loads(_receive(connection))
        if not hmac.compare_digest(str(head["secret"]), self._secret):
            return "the secret is not this fleet's"
        try:
            parts = [_part(facts) for facts in head["parts"]]
        except (ConfigError, ValueError) as problem:
            return str(problem)
        data = _exactly(connection, int(head["bytes"]))
        if zlib.crc32(data) != head["crc32"]:
            return "its bytes changed on the way"
        try:
            self._manager.adopt(str(head["deployment"]), parts, data, head["about"])
        except SlackwaterError as problem:
            return str(problem)
        return None


def _facts(part: Part) -> list[Any]:
    key = part.key
    return [
        *(key.job, key.model, key.parameter, key.kind, key.start, key.stop),
        *(part.dtype, part.element_bytes, part.role.value, list(part.shape)),
    ]


def _part(facts: list[Any]) -> Part:
    *key, dtype, element_bytes, role, shape = facts
    return Part(StateKey(*key), dtype, element_bytes, Role(role), tuple(shape))


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> bytes:
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if size > _LONGEST_HEAD:
        raise ValueError("no head of a state")
    return bytes(_exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = connection.recv_into(view[at:], min(size - at, _PIECE))
        if not got:
            raise EOFError("the connection ended")
        at += got
    return data
