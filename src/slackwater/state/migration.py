"""Moves a deployment's state, with checksums, into another node's host memory (PlexRL 4.5.3).

Both sides prove a secret that the control plane created for this move. The sender lists the parts,
the receiver those that it lacks (perhaps not the frozen base), and only these are sent. The
connection is encrypted if the receiver has a certificate, whose SHA-256 the sender must know.
"""

import contextlib
import logging
import socket
import ssl
import struct
import threading
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec

from slackwater.model.errors import ConfigError, RefusedError, SlackwaterError, UnavailableError
from slackwater.model.residency import StoredPart, Tier
from slackwater.state.image import Bytes
from slackwater.state.manager import StateManager
from slackwater.wire.framed_socket import receive_into, receive_message, send_message
from slackwater.wire.proof import prove_as_client, prove_as_server, wrap_pinned

logger = logging.getLogger(__name__)
_SUM = struct.Struct("<I")
_SILENCE_S = 30.0
_PURPOSE = b"states 2"


def migrate(
    manager: StateManager,
    deployment: str,
    address: tuple[str, int],
    secret: str,
    *,
    arrives_as: str,
    pin: str | None = None,
) -> int:
    """Send the state to the node at the address; the number of bytes sent.

    The state stays here: the caller forgets it once it is in use on the other node.
    """
    manager.evict(deployment, Tier.HOST, timeout_s=_SILENCE_S)
    manager.ensure(deployment, Tier.HOST, timeout_s=_SILENCE_S)
    if manager.is_blank(deployment):
        raise RefusedError(f"state of {deployment}: has no content yet")
    with manager.reading_parts(deployment) as parts:
        about = dict(manager.about(deployment))
        renamed = [_rename(part, deployment, arrives_as) for part in parts.on_device]
        head = {"deployment": arrives_as, "parts": renamed, "about": about}
        try:
            with _dial(address, pin) as connection:
                prove_as_client(connection, secret.encode(), _PURPOSE)
                _send(connection, head)
                wanted = _answer(connection)["wanted"]
                found = [parts.stored[int(number)] for number in wanted]
                _send_bytes(connection, found)
                _answer(connection)
        except RefusedError as error:
            raise RefusedError(f"state of {deployment}: {error}; it is still here") from error
        except (OSError, ValueError, KeyError, TypeError, UnavailableError) as error:
            raise UnavailableError(
                f"state of {deployment}: {address[0]}:{address[1]} did not take it: {error}; it is "
                "still here"
            ) from error
    return sum(len(each) for each in found)


class MigrationServer:
    """Receives states from nodes that know a secret; `warm` as in `StateManager.register`.

    `expected` maps each secret, which is used once, to the model that it is for.
    """

    def __init__(
        self,
        manager: StateManager,
        expected: dict[str, str],
        host: str = "127.0.0.1",
        *,
        warm: bool = True,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._manager, self._expected, self._warm = manager, expected, warm
        self._context = context
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True, name="state-migration").start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._take, args=(connection,), daemon=True).start()

    def _take(self, plain: socket.socket) -> None:
        plain.settimeout(_SILENCE_S)
        try:
            with self._encrypt(plain) as connection:
                model = self._authenticate(connection)
                try:
                    self._receive_state(connection, model)
                    reply: dict[str, Any] = {}
                except SlackwaterError as refused:
                    reply = {"error": str(refused)}
                _send(connection, reply)
        except (OSError, ValueError, KeyError, TypeError, SlackwaterError) as problem:
            logger.warning("a state did not arrive: %s", problem)

    def _authenticate(self, connection: socket.socket) -> str:
        """The model whose state the peer may send."""
        proven = prove_as_server(
            connection, lambda: [key.encode() for key in list(self._expected)], _PURPOSE
        )
        connection.settimeout(_SILENCE_S)
        return self._expected.pop(proven.decode(), "")

    def _encrypt(self, plain: socket.socket) -> socket.socket:
        if self._context is None:
            return plain
        try:
            return self._context.wrap_socket(plain, server_side=True)
        except BaseException:
            plain.close()
            raise

    def _receive_state(self, connection: socket.socket, model: str) -> None:
        head = _receive(connection)
        name, about = str(head["deployment"]), dict(head["about"])
        try:
            parts = msgspec.convert(head["parts"], list[StoredPart])
        except msgspec.ValidationError as error:
            raise ConfigError.of("state", name, f"has parts that cannot be read: {error}") from None
        if not name.startswith(f"{model}@"):
            raise RefusedError(f"{name}: must be the announced state, of {model}")
        with self._manager.receive(name, parts, about, warm=self._warm) as places:
            empty = about.get("empty_kinds", ())
            wanted = [n for n in sorted(places) if parts[n].key.kind not in empty]
            _send(connection, {"wanted": wanted})
            _receive_bytes(connection, [places[number] for number in wanted])


def _dial(address: tuple[str, int], pin: str | None) -> socket.socket:
    plain = socket.create_connection(address, timeout=_SILENCE_S)
    if pin is None:
        return plain
    try:
        return wrap_pinned(plain, pin)
    except BaseException:
        plain.close()
        raise


def _rename(part: StoredPart, before: str, after: str) -> StoredPart:
    key = part.key
    return replace(part, key=replace(key, model=after)) if key.model == before else part


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    send_message(connection, msgspec.json.encode(message))


def _receive(connection: socket.socket) -> dict[str, Any]:
    body = receive_message(connection)
    if body is None:
        raise UnavailableError("the peer closed the connection")
    return msgspec.json.decode(body, type=dict[str, Any])


def _answer(connection: socket.socket) -> dict[str, Any]:
    reply = _receive(connection)
    if reply.get("error"):
        raise RefusedError(str(reply["error"]))
    return reply


def _send_bytes(connection: socket.socket, found: Iterable[Bytes]) -> None:
    total = 0
    for each in found:
        total = zlib.crc32(each.data, total)
        connection.sendall(each.data)
    connection.sendall(_SUM.pack(total))


def _receive_bytes(connection: socket.socket, places: Iterable[Bytes]) -> None:
    total = 0
    for place in places:
        receive_into(connection, place.data)
        total = zlib.crc32(place.data, total)
    expected = bytearray(_SUM.size)
    receive_into(connection, memoryview(expected))
    if _SUM.unpack(expected) != (total,):
        raise RefusedError("its bytes changed on the way")
