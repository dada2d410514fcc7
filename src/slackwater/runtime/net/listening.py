"""Sockets to listen on, and the limit of connections that have not authenticated."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from slackwater.model.errors import ConfigError, UnavailableError

logger = logging.getLogger(__name__)

_ACCEPT_AGAIN_S = 0.1
MOST_STRANGERS = 128
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 takes a free one below the ephemeral range of clients."""
    if port:
        try:
            return _bind(host, port)
        except OSError as error:
            where = f"{host}:{port}"
            raise ConfigError.of("address", where, f"cannot be listened on: {error}") from None
    for _ in range(100):
        try:
            return _bind(host, 20_000 + secrets.randbelow(12_000))
        except OSError as error:
            last = error
    raise UnavailableError(f"no free port between 20000 and 32000 on {host}: {last}")


def bind_same_port(host: str, port: int, port_file: Path | None) -> socket.socket:
    """As `bind_socket`; where any port would do, the one that was bound before, which the file
    keeps, so that who outlived the last control plane finds this one.
    """
    if port_file is None:
        return bind_socket(host, port)
    if not port:
        with contextlib.suppress(OSError, ValueError):
            return _bind(host, int(port_file.read_text()))
    made = bind_socket(host, port)
    port_file.write_text(str(made.getsockname()[1]))
    return made


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(128)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


async def accept_connections(listening: socket.socket) -> AsyncIterator[tuple[socket.socket, Any]]:
    """The connections that come in, with their peers' addresses."""
    loop = asyncio.get_running_loop()
    with listening:
        while True:
            try:
                connection = await loop.sock_accept(listening)
            except OSError as error:  # too many files are open: retry when some are closed
                logger.warning("no connection can be taken: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
            else:
                yield connection


class UnprovenPeers:
    """Closes what does not prove itself within `within_s`, or is the oldest of more than `most`.

    A worker authenticates within milliseconds, so that peers that hold connections open cannot keep
    it out.
    """

    def __init__(self, most: int, within_s: float) -> None:
        self._most = most
        self._within_s = within_s
        self._open: dict[object, tuple[Callable[[], object], asyncio.TimerHandle]] = {}

    def __contains__(self, who: object) -> bool:
        return who in self._open

    def add(self, who: object, close: Callable[[], object]) -> None:
        """A connection was opened; `close` must end it. For a known one only that changes."""
        if who in self._open:
            self._open[who] = (close, self._open[who][1])
            return
        if len(self._open) >= self._most:
            self._close(next(iter(self._open)))
        loop = asyncio.get_running_loop()
        self._open[who] = (close, loop.call_later(self._within_s, self._close, who))

    def remove(self, who: object) -> None:
        """It has proved itself, or is gone."""
        found = self._open.pop(who, None)
        if found is not None:
            found[1].cancel()

    def _close(self, who: object) -> None:
        found = self._open.pop(who, None)
        if found is not None:
            close, timer = found
            timer.cancel()
            close()
